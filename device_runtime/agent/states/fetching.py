"""The states of the agent that collect blobs, and the one that collects what a task needs."""

import time
from collections.abc import Callable, Collection

from typing_extensions import override

from device_runtime.agent.choosing import able, probe
from device_runtime.agent.context import Context
from device_runtime.agent.fetching import Fetch
from device_runtime.agent.machine import Event
from device_runtime.agent.refusals import refusal_of
from device_runtime.agent.states.base import DeviceState
from device_runtime.training.measuring import INFER, STATS
from device_runtime.training.routines import routine_of
from fleet_protocol.errors import RefusalReason, RefusedError, ShoalError, StorageError
from fleet_protocol.manifest import parse_manifest
from fleet_protocol.messages import BlobRef, NeedChunks


class Collecting(DeviceState):
    """Collects blobs; others know what for."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self._fetch = Fetch(
            ctx.kit.blobs,
            subscribe=ctx.uplink.subscribe_blob,
            unsubscribe=ctx.uplink.unsubscribe_blob,
            request=lambda digest, ranges: ctx.send(NeedChunks, digest=digest, ranges=ranges),
            repair_seconds=ctx.kit.config.repair_seconds,
        )
        self._made_room = False

    @override
    def leave(self) -> None:
        self._fetch.close()

    @override
    def on_chunk(self, digest: str, frame: bytes) -> None:
        if self._fetch.waits_for(digest):
            self._guarded(lambda: self._take(digest, frame))
        else:
            super().on_chunk(digest, frame)

    @override
    def on_wake(self) -> None:
        if not self.ctx.uplink.need().connected:
            self.wake_at = time.monotonic() + self.ctx.kit.config.repair_seconds
            return
        count = self._fetch.repair(time.monotonic())
        self.ctx.kit.journal.info(f"asked again for {count} blobs")
        self.wake_at = self._fetch.repair_at

    def _guarded(self, action: Callable[[], None]) -> None:
        """Fetch; when the disk is full, delete what no task uses and try once more before giving up."""
        ctx = self.ctx
        try:
            try:
                action()
            except StorageError as error:
                if self._made_room or refusal_of(error)[0] is not RefusalReason.NO_SPACE:
                    raise
                self._made_room = True
                freed = ctx.kit.cache.evict(ctx.blobs_in_use(), everything=True)
                ctx.kit.journal.warning(f"{error}; freed {freed} bytes of older blobs")
                action()
        except (ShoalError, OSError) as error:
            ctx.fail(error)

    def _take(self, digest: str, frame: bytes) -> None:
        if self._fetch.on_chunk(digest, frame, time.monotonic()) is not None:
            self.ctx.kit.journal.info(f"fetched {digest[:12]}")
            self._advance()
        self.wake_at = self._fetch.repair_at

    def _want(self, *refs: BlobRef, asked: Collection[str] = ()) -> None:
        self._fetch.want(refs, time.monotonic(), asked)
        self.wake_at = self._fetch.repair_at
        self._advance()

    def _advance(self) -> None:
        """Go on, now that another blob is there."""


class Fetching(Collecting):
    """Collects the manifest, the graphs this board needs of it, and the weights."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self._graphs: tuple[str, ...] | None = None
        self._began = time.monotonic()

    @override
    def enter(self) -> None:
        ctx = self.ctx
        task = ctx.need_task()
        try:
            ctx.save(phase="fetching", update=None, metrics=None)
        except StorageError as error:
            ctx.fail(error)
            return
        ctx.tell_state()
        choice = task.record.choice
        offered = {"artifact_set": choice.artifact_set, "weights": choice.weights}
        refs = {ref.digest: ref for ref in offered.values()}
        if not task.record.chosen:
            telling = probe(able(task.offer, ctx.kit.config, ctx.need_bench()))[1]
            refs[telling.digest] = telling
        lacks = {name: ref.digest for name, ref in offered.items() if not ctx.kit.blobs.begun(ref.digest)}
        for digest in lacks.values():  # its chunks may come as soon as it is asked for
            ctx.uplink.subscribe_blob(digest)
        ctx.accept(tuple(lacks))
        self._guarded(lambda: self._want(*refs.values(), asked=lacks.values()))

    @override
    def on_repeat(self) -> None:
        self.ctx.accept()

    @override
    def _advance(self) -> None:
        """Go on when the manifest, or everything, is there."""
        ctx, task = self.ctx, self.ctx.need_task()
        choice = task.record.choice
        if self._graphs is None and not self._fetch.waits_for(choice.artifact_set.digest):
            manifest = parse_manifest(ctx.kit.blobs.read(choice.artifact_set.digest))
            if manifest.tier != choice.tier:
                raise RefusedError(
                    RefusalReason.MALFORMED, f"the offer says tier {choice.tier}, its manifest {manifest.tier}"
                )
            large = ctx.kit.memory.too_large
            if large is not None and large.forbids(routine_of(task.offer).phase, manifest.peak_memory_bytes):
                raise RefusedError(RefusalReason.UNSUPPORTED, large.said)
            task.manifest = manifest
            graphs = routine_of(task.offer).graphs(manifest, ctx.need_bench())
            predicts = [key for key in (STATS, INFER) if ctx.kit.config.predict and key in manifest.graphs]
            self._graphs = tuple(dict.fromkeys((*graphs, *predicts)))
            specs = task.files(self._graphs)
            chunk_bytes = choice.artifact_set.chunk_bytes
            self._want(*(BlobRef(digest=s.digest, size=s.size, chunk_bytes=chunk_bytes) for s in specs))
        elif self._graphs is not None and self._fetch.complete and not ctx.events:
            self._finish()

    def _finish(self) -> None:
        ctx, task = self.ctx, self.ctx.need_task()
        now = time.monotonic()
        seconds, task.fetch_seconds = now - self._began, now - task.started
        if self._fetch.received_bytes and seconds > 0:
            ctx.measured.link_bytes_per_second = self._fetch.received_bytes / seconds
        choice = task.record.choice
        if self._graphs is not None:
            digests = [spec.digest for spec in task.files(self._graphs)]
            about = {**task.offer.model_dump(include={"run", "round", "version"}), "tier": choice.tier}
            ctx.kit.cache.used(choice.artifact_set.digest, digests, choice.weights.digest, about)
        ctx.kit.journal.info(f"fetched everything: {self._fetch.received_bytes} bytes in {seconds:.2f} s")
        if not task.record.chosen:
            ctx.post(Event.FETCHED_PROBE)
            return
        measures = routine_of(task.offer).phase == "measuring"
        ctx.post(Event.FETCHED_STATISTICS if measures else Event.FETCHED_TRAIN)
