"""The state of the agent that collects what a task needs."""

import time
from collections.abc import Mapping

from typing_extensions import override

from device_runtime.agent.choosing import able_choices, weights_to_measure
from device_runtime.agent.context import Context
from device_runtime.agent.machine import Event
from device_runtime.agent.states.collecting import Collecting
from device_runtime.agent.task_in_hand import TaskInHand, blob_refs
from device_runtime.training.measuring import INFER, STATS
from device_runtime.training.routines import routine_of
from fleet_protocol.errors import RefusalReason, RefusedError, StorageError
from fleet_protocol.manifest import Manifest, parse_manifest
from fleet_protocol.messages import BlobRef


class Fetching(Collecting):
    """Collects the manifest, the graphs this board needs of it, and the weights."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self._graphs: tuple[str, ...] | None = None  # known as soon as the manifest is there
        self._began = time.monotonic()

    @override
    def enter(self) -> None:
        ctx = self.ctx
        task = ctx.need_task()
        try:
            # On disk first, so that a restart knows what may have been begun.
            ctx.save(phase="fetching", update=None, metrics=None)
        except StorageError as error:
            ctx.fail(error)
            return
        ctx.announce_state()
        choice = task.record.choice
        offered = {"artifact_set": choice.artifact_set, "weights": choice.weights}
        refs = {ref.digest: ref for ref in offered.values()}
        if not task.record.chosen:
            choices = able_choices(task.offer, ctx.services.config, ctx.need_setup())
            telling = weights_to_measure(choices)
            refs[telling.digest] = telling
        lacks: dict[str, str] = {}
        for name, ref in offered.items():
            if not ctx.services.blobs.begun(ref.digest):
                lacks[name] = ref.digest
        self._guarded(lambda: self._accept_and_collect(refs, lacks))

    def _accept_and_collect(self, refs: Mapping[str, BlobRef], lacks: Mapping[str, str]) -> None:
        """Accept the task, and collect its blobs.

        Args:
            refs: what is needed first, by digest.
            lacks: digests of what is not here, by the name that the accept has for it.
        """
        # Subscribed to before they are asked for, since their chunks may come at once.
        for digest in lacks.values():
            self.ctx.uplink.subscribe_blob(digest)
        self.ctx.accept(tuple(lacks))
        self._collect(*refs.values(), asked=lacks.values())

    @override
    def on_repeat(self) -> None:
        self.ctx.accept()

    @override
    def _proceed(self) -> None:
        """Go on when the manifest, or everything, is there."""
        task = self.ctx.need_task()
        if self._graphs is None:
            if not self._fetch.waits_for(task.record.choice.artifact_set.digest):
                self._collect_graphs(task)
        elif self._fetch.complete and not self.ctx.events:
            self._finish(task, self._graphs)

    def _collect_graphs(self, task: TaskInHand) -> None:
        """Read the manifest, and collect the graphs that this board needs of the set."""
        ctx = self.ctx
        choice = task.record.choice
        manifest = parse_manifest(ctx.services.blobs.read(choice.artifact_set.digest))
        # The weights would be those of another sub-model.
        if manifest.tier != choice.tier:
            raise RefusedError(
                RefusalReason.MALFORMED,
                f"the offer says tier {choice.tier}, its manifest {manifest.tier}",
            )
        self._require_memory(task, manifest)
        task.manifest = manifest
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
        """Return the keys of the graphs of the routine, and of those that predict, each once."""
        graphs = list(routine_of(task.offer).graphs(manifest, self.ctx.need_setup()))
        if self.ctx.services.config.predict:
            graphs += [key for key in (STATS, INFER) if key in manifest.graphs]
        return tuple(dict.fromkeys(graphs))

    def _finish(self, task: TaskInHand, graphs: tuple[str, ...]) -> None:
        """Note what was fetched and how fast, and say what comes next."""
        ctx = self.ctx
        now = time.monotonic()
        seconds = now - self._began
        task.fetch_seconds = now - task.started
        if self._fetch.received_bytes and seconds > 0:
            ctx.measurements.link_bytes_per_second = self._fetch.received_bytes / seconds
        choice = task.record.choice
        digests = [spec.digest for spec in task.files(graphs)]
        # What `shoal device predict` says of the model that it predicts with.
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
