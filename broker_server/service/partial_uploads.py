"""Collects the chunks of arriving updates; checks, decodes and stores complete updates.

Chunks are in memory or on disk. If the server ends, it loses those in memory, and requests them
again like lost chunks.
"""

import contextlib
from collections import OrderedDict
from functools import lru_cache
from pathlib import Path

from typing_extensions import override

from broker_server.rounds.collecting import OpenTask
from broker_server.updates.intake import MOST_SENT, receive_update
from broker_server.updates.values import StoredUpdate
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.blobs import Chunk, decode_chunk
from fleet_protocol.digests import blob_digest, matches
from fleet_protocol.encodings import open_weights
from fleet_protocol.errors import BlobError, RefusalReason, RefusedError
from fleet_protocol.messages import BlobRef, Ranges
from fleet_protocol.messages.bounds import LEAST_CHUNK_BYTES
from fleet_protocol.part_file import PartFile

_UNKNOWN_DIGEST = "0" * 64
_OPEN_FILES = 512  # half of the usual limit of open files of a process
# of all updates in memory; further ones are written as they arrive
_HELD_BYTES = 16 * 1024 * 1024


class _InMemory(PartFile):
    """An arriving update in memory."""

    def __init__(self, ref: BlobRef) -> None:
        self.ref = ref
        self._have = set()
        self.payloads: dict[int, memoryview] = {}

    @override
    def _write(self, chunk: Chunk) -> None:
        self.payloads[chunk.index] = chunk.payload

    def join(self) -> bytes:
        """Return the bytes of the whole update, all of whose chunks have arrived."""
        return b"".join(self.payloads[index] for index in range(self.ref.chunks))


class PartialUploads:
    """The updates that are arriving, by task.

    Args:
        blobs: where finished updates are stored, and those that are written as they arrive.
        source: contains the weights that were sent to the devices.

    Attributes:
        sent: reads weights that were sent to devices from `source`, by digest.
    """

    def __init__(self, blobs: BlobStore, source: BlobStore) -> None:
        self.blobs = blobs
        self.sent = lru_cache(MOST_SENT)(lambda digest: open_weights(source.path(digest)))
        self._folder = f"{blobs.root}/parts"
        # Tasks with a file, including those of an earlier server. An upload that began on disk
        # continues there, so a restart does not lose any of it.
        self._begun = {path.name for path in Path(self._folder).iterdir()}
        self._open: OrderedDict[str, PartFile] = OrderedDict()  # the least recently used first
        self._held: dict[str, _InMemory] = {}  # memory for all of them together

    def add(self, task: str, frame: bytes, limit_bytes: int) -> None:
        """Add a chunk; one that is already present changes nothing.

        Args:
            task: id of the task.
            frame: the chunk as received.
            limit_bytes: the most bytes that the whole update may have.

        Raises:
            RefusedError: it is damaged, does not belong to the task, has a different chunk size
                from earlier chunks, or is too large.
            StorageError: the disk is full.
        """
        try:
            chunk = decode_chunk(frame)
        except BlobError as error:
            raise _malformed(task, error) from error
        if chunk.size > limit_bytes or chunk.chunk_bytes < LEAST_CHUNK_BYTES:
            raise RefusedError(
                RefusalReason.OVERSIZED,
                f"a chunk of task {task} belongs to {chunk.size} bytes in chunks of "
                f"{chunk.chunk_bytes}; the task allows {limit_bytes} bytes",
            )
        # Chunks do not name the digest of the whole: its announcement does.
        ref = BlobRef(digest=_UNKNOWN_DIGEST, size=chunk.size, chunk_bytes=chunk.chunk_bytes)
        try:
            upload = self._arriving(task, ref)
            if ref.size == upload.ref.size and ref.chunk_bytes < upload.ref.chunk_bytes:
                # Its device has cut it into smaller chunks because its broker refused larger ones.
                self.drop(task)
                upload = self._arriving(task, ref)
            upload.add(chunk)
        except BlobError as error:
            raise _malformed(task, error) from error

    def missing(self, task: str, ref: BlobRef) -> Ranges:
        """Return the missing chunks, after dropping an upload of another size or chunk size."""
        upload = self._arriving(task, ref)
        if (upload.ref.size, upload.ref.chunk_bytes) != (ref.size, ref.chunk_bytes):
            self.drop(task)
            upload = self._arriving(task, ref)
        return upload.missing()

    def finish(self, task: str, ref: BlobRef) -> bytes:
        """Return the bytes of a complete update, which the caller then stores or drops.

        Nothing is moved yet: if this is a copy of another device's update, refusing it would remove
        the other's file.

        Raises:
            BlobError: the digest of the whole does not match; the upload is dropped.
        """
        held = self._held.pop(task, None)
        if held is None:
            upload = self._arriving(task, ref)
            del self._open[task]
            upload.ref = ref
            return upload.read_verified()
        data = held.join()
        if not matches(data, ref.digest):
            raise BlobError(f"the update does not have the digest {ref.digest[:12]}")
        return data

    def keep(self, task: str, digest: str, data: bytes) -> None:
        """Move a finished update to its place.

        After `BlobStore.sync` it survives a power cut there.
        """
        if task in self._begun:
            self._begun.discard(task)
            self.blobs.place(Path(self._folder, task), digest, durable=False)
        else:
            self.blobs.keep(digest, data)

    def check_and_store(self, task: OpenTask, ref: BlobRef, data: bytes) -> StoredUpdate:
        """Check a finished update, decode it and store it, by `broker_server.updates.intake`.

        Raises:
            BlobError: the weights that were sent to its device are damaged on disk.
            RefusedError: it does not match the request.
        """
        arrived = receive_update(data, task.expected, self.sent)
        if arrived.data is data:
            self.keep(task.record.id, ref.digest, data)
            return StoredUpdate(ref.digest, arrived.distance)
        self.drop(task.record.id)
        digest = blob_digest(arrived.data)
        self.blobs.keep(digest, arrived.data)
        return StoredUpdate(digest, arrived.distance)

    def drop(self, task: str) -> None:
        """Drop what has arrived of an update."""
        self._held.pop(task, None)
        self._close(task)
        if task in self._begun:
            self._begun.discard(task)
            Path(self._folder, task).unlink(missing_ok=True)

    def clear(self) -> None:
        """Drop everything; only while no round is open."""
        self.close()
        self._begun.clear()
        self.blobs.clear()

    def close(self) -> None:
        """Close every file without deleting its content, and drop the updates in memory.

        Files that nothing needs are removed.
        """
        self._held.clear()
        self.blobs.trim()
        for task in list(self._open):
            self._close(task)

    def _arriving(self, task: str, ref: BlobRef) -> PartFile:
        held = self._held.get(task)
        if held is not None:
            return held
        upload = self._open.get(task)
        if upload is None:
            if task not in self._begun and self._held_bytes() + ref.size <= _HELD_BYTES:
                return self._held.setdefault(task, _InMemory(ref))
            while len(self._open) >= _OPEN_FILES:
                self._close(next(iter(self._open)))
            upload = self.blobs.part(ref, key=task)
            self._open[task] = upload
            self._begun.add(task)
        self._open.move_to_end(task)
        return upload

    def _held_bytes(self) -> int:
        return sum(held.ref.size for held in self._held.values())

    def _close(self, task: str) -> None:
        upload = self._open.pop(task, None)
        if upload is not None:
            with contextlib.suppress(OSError):
                upload.close()


def _malformed(task: str, error: BlobError) -> RefusedError:
    return RefusedError(RefusalReason.MALFORMED, f"a chunk of task {task}: {error}")
