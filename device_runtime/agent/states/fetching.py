"""The state of the agent that fetches the blobs of a task."""

import time
from collections.abc import Mapping

from typing_extensions import override

from device_runtime.agent.choosing import able_choices, weights_to_measure
from device_runtime.agent.context import Context
from device_runtime.agent.link_speed import TransferTimer
from device_runtime.agent.machine import Event
from device_runtime.agent.states.collecting import Collecting
from device_runtime.agent.task_in_hand import TaskInHand, blob_refs
from device_runtime.training.measuring import graphs_of_prediction
from device_runtime.training.routines import routine_of
from fleet_protocol.errors import RefusalReason, RefusedError, StorageError
from fleet_protocol.manifest import Manifest, parse_manifest
from fleet_protocol.memory_plans import plan_text
from fleet_protocol.messages import BlobRef


class Fetching(Collecting):
    """Fetches the manifest, the graphs of it that this board needs, and the weights.

    A board that chooses its sub-model then fetches weights without other traffic, to time the link.
    """

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self._graphs: tuple[str, ...] | None = None  # known once the manifest is on disk
        self._began = time.monotonic()
        self._timed = ""  # digest of the weights that are timed
        self._timer = TransferTimer(self._began)
        self._probed = False  # whether the weights that time the link were asked for

    @override
    def enter(self) -> None:
        ctx = self.ctx
        task = ctx.need_task()
        try:
            # First on disk, so that a restart knows what may have begun.
            ctx.save(phase="fetching", update=None, metrics=None)
        except StorageError as error:
            ctx.fail(error)
            return
        ctx.announce_state()
        choice = task.record.choice
        offered = {"artifact_set": choice.artifact_set, "weights": choice.weights}
        refs = {ref.digest: ref for ref in offered.values()}
        self._timed = choice.weights.digest
        self._probed = task.record.chosen
        lacks: dict[str, str] = {}
        for name, ref in offered.items():
            if not ctx.services.blobs.begun(ref.digest):
                lacks[name] = ref.digest
        self._guarded(lambda: self._accept_and_collect(refs, lacks))

    def _accept_and_collect(self, refs: Mapping[str, BlobRef], lacks: Mapping[str, str]) -> None:
        """Accept the task, and fetch its blobs.

        Args:
            refs: the blobs needed first, by digest.
            lacks: digests of missing blobs, by their name in the accept message.
        """
        # Subscribe before requesting, because chunks may arrive immediately.
        for digest in lacks.values():
            self.ctx.uplink.subscribe_blob(digest)
        self.ctx.accept(tuple(lacks))
        self._collect(*refs.values(), asked=lacks.values())

    @override
    def on_repeat(self) -> None:
        self.ctx.accept()

    @override
    def _proceed(self) -> None:
        """Continue when the manifest, or everything, is on disk."""
        task = self.ctx.need_task()
        if self._graphs is None:
            if not self._fetch.waits_for(task.record.choice.artifact_set.digest):
                self._collect_graphs(task)
        elif self._fetch.complete and not self.ctx.events and not self._collect_probe(task):
            self._finish(task, self._graphs)

    def _collect_probe(self, task: TaskInHand) -> bool:
        """Fetch the weights that time the link of a board that chooses its sub-model.

        Returns:
            Whether they were requested; False if all weights that the board may choose are on disk.
        """
        if self._probed:
            return False
        self._probed = True
        ctx = self.ctx
        choices = able_choices(task.offer, ctx.services.config, ctx.need_setup())
        probe = weights_to_measure(
            choices, lambda digest: ctx.services.blobs.path(digest).is_file()
        )
        if probe is None:
            return False
        ctx.measurements.link.note_download(self._timer.speed())
        self._timed = probe.digest
        self._timer = TransferTimer(time.monotonic())
        self._collect(probe)
        return True

    @override
    def _receive_chunk(self, digest: str, frame: bytes, arrived_at: float) -> None:
        # Chunks of other blobs count, too, because they use the link during the timed transfer.
        if self._fetch.waits_for(self._timed) and (digest == self._timed or self._timer.runs):
            self._timer.note(len(frame), arrived_at)
        super()._receive_chunk(digest, frame, arrived_at)

    def _collect_graphs(self, task: TaskInHand) -> None:
        """Read the manifest, and fetch the graphs of the set that this board needs."""
        ctx = self.ctx
        choice = task.record.choice
        manifest = parse_manifest(ctx.services.blobs.read(choice.artifact_set.digest))
        # The weights would be those of another sub-model.
        if manifest.tier != choice.tier:
            raise RefusedError(
                RefusalReason.MALFORMED,
                f"the offer names tier {choice.tier}, but its manifest names tier {manifest.tier}",
            )
        self._require_memory(task, manifest)
        task.manifest = manifest
        ctx.services.journal.info(plan_text(manifest))
        self._graphs = self._needed_graphs(task, manifest)
        files = task.files(self._graphs)
        self._collect(*blob_refs(files, choice.artifact_set.chunk_bytes))

    def _require_memory(self, task: TaskInHand, manifest: Manifest) -> None:
        """Refuse a set that is as large as one that has killed the agent."""
        too_large = self.ctx.services.memory.too_large
        if too_large is None:
            return
        if too_large.forbids(routine_of(task.offer).phase, manifest.peak_memory_bytes):
            raise RefusedError(RefusalReason.UNSUPPORTED, too_large.explanation)

    def _needed_graphs(self, task: TaskInHand, manifest: Manifest) -> tuple[str, ...]:
        """Return the keys of the routine's graphs and of those that predict, without repetition."""
        graphs = list(routine_of(task.offer).graphs(manifest, self.ctx.need_setup()))
        if self.ctx.services.config.predict:
            graphs += graphs_of_prediction(manifest)
        return tuple(dict.fromkeys(graphs))

    def _finish(self, task: TaskInHand, graphs: tuple[str, ...]) -> None:
        """Record the size and speed of the download, and return the next event."""
        ctx = self.ctx
        now = time.monotonic()
        seconds = now - self._began
        task.fetch_seconds = now - task.started
        ctx.measurements.link.note_download(self._timer.speed())
        choice = task.record.choice
        digests = [spec.digest for spec in task.files(graphs)]
        # `shoal device predict` names these with the model that it uses.
        newest = {
            **task.offer.model_dump(include={"run", "round", "version"}),
            "tier": choice.tier,
        }
        ctx.services.cache.add_used(
            choice.artifact_set.digest, digests, choice.weights.digest, newest
        )
        ctx.services.journal.info(
            f"fetched everything: {self._fetch.received_bytes} bytes in {seconds:.2f} s"
        )
        if not task.record.chosen:
            ctx.post(Event.FETCHED_PROBE)
        elif routine_of(task.offer).phase == "measuring":
            ctx.post(Event.FETCHED_STATISTICS)
        else:
            ctx.post(Event.FETCHED_TRAIN)
