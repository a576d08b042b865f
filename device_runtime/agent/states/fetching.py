"""The states of the agent that collect blobs, and the one that collects what a task needs."""

import contextlib
import time
from collections.abc import Callable, Collection, Iterable

from typing_extensions import override

from device_runtime.agent.choosing import able, probe
from device_runtime.agent.context import Context
from device_runtime.agent.machine import Event
from device_runtime.agent.refusals import refusal_of
from device_runtime.agent.states.base import DeviceState
from device_runtime.training.measuring import INFER, STATS
from device_runtime.training.routines import routine_of
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.blobs import PartFile, decode_chunk
from fleet_protocol.digests import file_matches
from fleet_protocol.errors import (
    BlobError,
    RefusalReason,
    RefusedError,
    ShoalError,
    StorageError,
)
from fleet_protocol.manifest import parse_manifest
from fleet_protocol.messages import BlobRef, NeedChunks, Ranges

_TRIES = 3  # whole blobs whose content does not match their digest before the task is refused
_RANGES_PER_REQUEST = 512  # bounds the message; what is left out is asked for next time


class Fetch:
    """The blobs that one task still waits for.

    Args:
        blobs: where they go; chunks that arrived before a restart are there already.
        subscribe: called with a digest before its first request.
        unsubscribe: called with a digest when it is complete, or no longer wanted.
        request: called with a digest and the missing ranges.
        repair_seconds: silence after which missing chunks are asked for again.
    """

    def __init__(
        self,
        blobs: BlobStore,
        *,
        subscribe: Callable[[str], None],
        unsubscribe: Callable[[str], None],
        request: Callable[[str, Ranges], None],
        repair_seconds: float,
    ) -> None:
        self._blobs = blobs
        self._subscribe = subscribe
        self._unsubscribe = unsubscribe
        self._request = request
        self._repair_seconds = repair_seconds
        self._parts: dict[str, PartFile] = {}
        self._tries: dict[str, int] = {}
        self.repair_at = float("inf")
        self.received_bytes = 0

    @property
    def complete(self) -> bool:
        """Nothing is missing."""
        return not self._parts

    def waits_for(self, digest: str) -> bool:
        """Whether a blob is still missing."""
        return digest in self._parts

    def want(self, refs: Iterable[BlobRef], now: float, asked: Collection[str] = ()) -> None:
        """Ask for the blobs that are not on disk, intact.

        `now` is ``time.monotonic()``, here and below.

        Those `asked` for are under way already: subscribed to, and named by the accept. A disk that
        is full is a StorageError.
        """
        missing = [
            ref for ref in refs if ref.digest not in self._parts and not self._intact(ref.digest)
        ]
        for ref in missing:
            part = self._blobs.part(ref)
            self._parts[ref.digest] = part
            if part.complete:  # a crash came between the last chunk and the move
                self._finish(ref.digest)
        for ref in missing:
            if ref.digest in self._parts and ref.digest not in asked:
                self._subscribe(ref.digest)
                self._ask(ref.digest)
        self.repair_at = now + self._repair_seconds

    def _intact(self, digest: str) -> bool:
        path = self._blobs.path(digest)
        if not path.is_file():
            return False
        if file_matches(
            path, digest
        ):  # read piece by piece: the base of a model may be larger than the memory
            return True
        self._blobs.remove(digest)  # damaged on disk
        return False

    def _ask(self, digest: str) -> None:
        self._request(digest, self._parts[digest].missing()[:_RANGES_PER_REQUEST])

    def on_chunk(self, digest: str, frame: bytes, now: float) -> str | None:
        """Take a chunk of a blob as it came; the digest if the blob is complete now.

        Raises:
            RefusedError: the blob arrived whole several times and never matched its digest.
            StorageError: the disk is full or cannot be written.
        """
        part = self._parts.get(digest)
        if part is None:
            return None  # late, for a blob we have: the broker had it queued
        try:
            new = part.add(decode_chunk(frame))
        except BlobError:
            return None  # not kept, so the next repair asks for it
        self.repair_at = now + self._repair_seconds
        if not new:
            return None
        self.received_bytes += len(frame)
        return digest if part.complete and self._finish(digest) else None

    def _finish(self, digest: str) -> bool:
        """Move a complete part to its place; a part whose digest is wrong starts again."""
        part = self._parts.pop(digest)
        try:
            self._blobs.place(part.finish(), digest)
        except BlobError as error:
            self._tries[digest] = self._tries.get(digest, 0) + 1
            if self._tries[digest] >= _TRIES:
                raise RefusedError(
                    RefusalReason.BAD_DIGEST,
                    f"blob {digest[:12]} arrived {_TRIES} times with another content: {error}",
                ) from error
            self._parts[digest] = self._blobs.part(part.ref)
            self._ask(digest)
            return False
        self._unsubscribe(digest)
        return True

    def repair(self, now: float) -> int:
        """Ask again for everything that is missing, and return how many blobs that are."""
        for digest in self._parts:
            self._ask(digest)
        self.repair_at = now + self._repair_seconds
        return len(self._parts)

    def close(self) -> None:
        """Stop waiting; chunks that arrived stay on disk."""
        for digest, part in self._parts.items():
            # On a full disk each of a part's two files may fail once to write out what it still
            # holds.
            for _ in range(2):
                with contextlib.suppress(OSError):
                    part.close()
            self._unsubscribe(digest)
        self._parts.clear()


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
        """Fetch; when the disk is full, delete what no task uses and try once more before giving
        up.
        """
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
            telling = probe(able(task.offer, ctx.kit.config, ctx.need_setup()))[1]
            refs[telling.digest] = telling
        lacks = {
            name: ref.digest for name, ref in offered.items() if not ctx.kit.blobs.begun(ref.digest)
        }
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
        ctx = self.ctx
        task = self.ctx.need_task()
        choice = task.record.choice
        if self._graphs is None and not self._fetch.waits_for(choice.artifact_set.digest):
            manifest = parse_manifest(ctx.kit.blobs.read(choice.artifact_set.digest))
            if manifest.tier != choice.tier:
                raise RefusedError(
                    RefusalReason.MALFORMED,
                    f"the offer says tier {choice.tier}, its manifest {manifest.tier}",
                )
            large = ctx.kit.memory.too_large
            if large is not None and large.forbids(
                routine_of(task.offer).phase, manifest.peak_memory_bytes
            ):
                raise RefusedError(RefusalReason.UNSUPPORTED, large.said)
            task.manifest = manifest
            graphs = routine_of(task.offer).graphs(manifest, ctx.need_setup())
            predicts = [
                key for key in (STATS, INFER) if ctx.kit.config.predict and key in manifest.graphs
            ]
            self._graphs = tuple(dict.fromkeys((*graphs, *predicts)))
            specs = task.files(self._graphs)
            chunk_bytes = choice.artifact_set.chunk_bytes
            self._want(
                *(BlobRef(digest=s.digest, size=s.size, chunk_bytes=chunk_bytes) for s in specs)
            )
        elif self._graphs is not None and self._fetch.complete and not ctx.events:
            self._finish()

    def _finish(self) -> None:
        ctx = self.ctx
        task = self.ctx.need_task()
        now = time.monotonic()
        seconds = now - self._began
        task.fetch_seconds = now - task.started
        if self._fetch.received_bytes and seconds > 0:
            ctx.measured.link_bytes_per_second = self._fetch.received_bytes / seconds
        choice = task.record.choice
        if self._graphs is not None:
            digests = [spec.digest for spec in task.files(self._graphs)]
            about = {
                **task.offer.model_dump(include={"run", "round", "version"}),
                "tier": choice.tier,
            }
            ctx.kit.cache.used(choice.artifact_set.digest, digests, choice.weights.digest, about)
        ctx.kit.journal.info(
            f"fetched everything: {self._fetch.received_bytes} bytes in {seconds:.2f} s"
        )
        if not task.record.chosen:
            ctx.post(Event.FETCHED_PROBE)
            return
        measures = routine_of(task.offer).phase == "measuring"
        ctx.post(Event.FETCHED_STATISTICS if measures else Event.FETCHED_TRAIN)
