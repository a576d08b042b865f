"""Updates on their way in: chunks are kept in memory, or on disk, by task until the whole is there,
checked and stored.

A server that ends loses those in memory: they are asked for again, as what was lost on the way.
"""

import contextlib
from collections import OrderedDict
from functools import lru_cache
from pathlib import Path

from typing_extensions import override

from broker_server.rounds.collecting import OpenTask
from broker_server.updates.intake import MOST_SENT, receive_update
from broker_server.updates.values import Stored
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.blobs import Chunk, PartFile, decode_chunk
from fleet_protocol.digests import blob_digest, matches
from fleet_protocol.encodings import open_weights
from fleet_protocol.errors import BlobError, RefusalReason, RefusedError
from fleet_protocol.messages import BlobRef, Ranges

UNKNOWN_DIGEST = "0" * 64
QUIET_SECONDS = 0.3  # without a chunk, after which those that are missing are asked for
_OPEN_FILES = 512  # half of what a process may usually have open
_HELD_BYTES = (
    16 * 1024 * 1024
)  # of all updates in memory; those for which there is no room are written as they come


class _HeldPart(PartFile):
    """A part in memory."""

    def __init__(self, ref: BlobRef) -> None:
        self.ref = ref
        self._have = set()
        self.payloads: dict[int, memoryview] = {}

    @override
    def _write(self, chunk: Chunk) -> None:
        self.payloads[chunk.index] = chunk.payload


class PartialUploads:
    """The parts of the updates that are arriving.

    `sent` finds in `source` what their devices were sent, by digest.
    """

    def __init__(self, blobs: BlobStore, source: BlobStore) -> None:
        self.blobs = blobs
        self.sent = lru_cache(MOST_SENT)(lambda digest: open_weights(source.path(digest)))
        self._parts = f"{blobs.root}/parts"
        # Tasks of which there is a file, also from before.
        self._begun = {path.name for path in Path(self._parts).iterdir()}
        self._open: OrderedDict[str, PartFile] = OrderedDict()
        self._held: dict[str, _HeldPart] = {}

    def add(self, task: str, frame: bytes, limit_bytes: int) -> None:
        """Keep a chunk, as it travelled, of an update that may have so many bytes at most.

        Raises:
            RefusedError: it is damaged, foreign, of another cut than those before it, or too large.
            StorageError: the disk is full.
        """
        try:
            chunk = decode_chunk(frame)
        except BlobError as error:
            raise RefusedError(
                RefusalReason.MALFORMED, f"a chunk of task {task}: {error}"
            ) from error
        if chunk.size > limit_bytes or chunk.chunk_bytes < 1024:
            raise RefusedError(
                RefusalReason.OVERSIZED,
                f"a chunk of task {task} belongs to {chunk.size} bytes cut at {chunk.chunk_bytes}; "
                f"the task allows {limit_bytes}",
            )
        part = self._part(
            task,
            BlobRef(digest=UNKNOWN_DIGEST, size=chunk.size, chunk_bytes=chunk.chunk_bytes),
        )
        try:
            part.add(chunk)
        except BlobError as error:
            raise RefusedError(
                RefusalReason.MALFORMED, f"a chunk of task {task}: {error}"
            ) from error

    def missing(self, task: str, ref: BlobRef) -> Ranges:
        """Which chunks of an update are not here; a part of another size or cut is dropped."""
        part = self._part(task, ref)
        if (part.ref.size, part.ref.chunk_bytes) != (ref.size, ref.chunk_bytes):
            self.drop(task)
            part = self._part(task, ref)
        return part.missing()

    def finish(self, task: str, ref: BlobRef) -> bytes:
        """Verify a complete update, which is to be kept or dropped next.

        Only what was checked takes its place: a copy of what another device sent must not, or its
        refusal would take the other's away.

        Returns:
            Its bytes.

        Raises:
            BlobError: the whole does not match its digest; the part is dropped.
        """
        if (held := self._held.pop(task, None)) is not None:
            data = b"".join(held.payloads[index] for index in range(ref.chunks))
            if not matches(data, ref.digest):
                raise BlobError(f"the update does not have the digest {ref.digest[:12]}")
            return data
        part = self._part(task, ref)
        del self._open[task]
        part.ref = ref
        return part.take()

    def keep(self, task: str, digest: str, data: bytes) -> None:
        """Put a finished update in its place, where it is safe from a power cut after
        `BlobStore.sync`.
        """
        if task in self._begun:
            self._begun.discard(task)
            self.blobs.place(Path(self._parts, task), digest, durable=False)
        else:
            self.blobs.keep(digest, data)

    def take(self, task: OpenTask, ref: BlobRef, data: bytes) -> Stored:
        """Check a finished update, decode it, and put it in its place.

        Raises:
            BlobError: what its device was sent is damaged on disk.
            RefusedError: it is not what was asked for.
        """
        arrived = receive_update(data, task.expected, self.sent)
        if arrived.data is data:
            self.keep(task.record.id, ref.digest, data)
            return Stored(ref.digest, arrived.distance)
        self.drop(task.record.id)
        digest = blob_digest(arrived.data)
        self.blobs.keep(digest, arrived.data)
        return Stored(digest, arrived.distance)

    def drop(self, task: str) -> None:
        """Forget what has arrived of an update."""
        self._held.pop(task, None)
        self._close(task)
        if task in self._begun:
            self._begun.discard(task)
            Path(self._parts, task).unlink(missing_ok=True)

    def clear(self) -> None:
        """Forget everything; only while no round is open."""
        self.close()
        self._begun.clear()
        self.blobs.clear()

    def close(self) -> None:
        """Close every file, whose content stays, and forget what is in memory, and files that
        nothing needs.
        """
        self._held.clear()
        self.blobs.trim()
        for task in list(self._open):
            self._close(task)

    def _part(self, task: str, ref: BlobRef) -> PartFile:
        if (held := self._held.get(task)) is not None:
            return held
        part = self._open.get(task)
        if part is None:
            # One that was begun before the server ended is gone on with.
            if (
                task not in self._begun
                and sum(held.ref.size for held in self._held.values()) + ref.size <= _HELD_BYTES
            ):
                return self._held.setdefault(task, _HeldPart(ref))
            while len(self._open) >= _OPEN_FILES:
                self._close(next(iter(self._open)))
            part = self._open[task] = self.blobs.part(ref, key=task)
            self._begun.add(task)
        self._open.move_to_end(task)
        return part

    def _close(self, task: str) -> None:
        part = self._open.pop(task, None)
        if part is not None:
            with contextlib.suppress(OSError):
                part.close()
