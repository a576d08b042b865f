"""Blobs in chunks: framing, a digest per chunk and per blob, missing ranges, and a part file that survives restarts.

A chunk travels as one binary payload, all integers big-endian:

    offset  bytes  content
    0       4      magic "SHC1"
    4       4      index of the chunk
    8       8      size of the blob
    16      4      payload bytes of every chunk but the last
    20      32     sha256 of the payload
    52      ...    payload

Brokers drop queued messages silently when a queue overflows, so completeness is ours: the receiver keeps what it has,
knows what it misses, and asks for that.
"""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path

from fleet_protocol.errors import BlobError, StorageError
from fleet_protocol.manifest import digest_of
from fleet_protocol.messages import BlobRef, Ranges

__all__ = [
    "DEFAULT_CHUNK_BYTES",
    "FRAME_OVERHEAD",
    "Chunk",
    "PartFile",
    "blob_ref",
    "decode_chunk",
    "encode_chunk",
    "indices_of",
    "iter_chunks",
    "ranges_of",
    "storage_error",
]

DEFAULT_CHUNK_BYTES = 96 * 1024  # hosted brokers cap a packet at 128 kB

_MAGIC = b"SHC1"
_HEADER = struct.Struct(">4sIQI32s")
FRAME_OVERHEAD = _HEADER.size


@dataclass(frozen=True)
class Chunk:
    """One verified chunk.

    Attributes:
        index: position in the blob, from 0.
        size: bytes of the whole blob.
        chunk_bytes: payload bytes of every chunk but the last.
        payload: the bytes.
    """

    index: int
    size: int
    chunk_bytes: int
    payload: memoryview


def blob_ref(data: bytes | memoryview, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> BlobRef:
    """Name a blob by its content.

    Args:
        data: the whole blob.
        chunk_bytes: payload bytes per chunk.
    """
    return BlobRef(digest=digest_of(data), size=len(data), chunk_bytes=chunk_bytes)


def encode_chunk(data: bytes | memoryview, index: int, chunk_bytes: int) -> bytes:
    """Frame one chunk of a blob.

    Args:
        data: the whole blob.
        index: which chunk, from 0.
        chunk_bytes: payload bytes per chunk.
    """
    payload = memoryview(data)[index * chunk_bytes : (index + 1) * chunk_bytes]
    return b"".join((_HEADER.pack(_MAGIC, index, len(data), chunk_bytes, hashlib.sha256(payload).digest()), payload))


def iter_chunks(data: bytes | memoryview, chunk_bytes: int, ranges: Ranges) -> Iterator[tuple[int, bytes]]:
    """Frame the chunks of some ranges, in order.

    Args:
        data: the whole blob.
        chunk_bytes: payload bytes per chunk.
        ranges: half-open ranges of indices; parts beyond the blob are skipped.

    Yields:
        Index and frame.
    """
    count = -(-len(data) // chunk_bytes)
    for start, stop in ranges:
        for index in range(max(start, 0), min(stop, count)):
            yield index, encode_chunk(data, index, chunk_bytes)


def decode_chunk(frame: bytes) -> Chunk:
    """Verify one frame.

    Args:
        frame: the payload of one MQTT message.

    Raises:
        BlobError: the frame is truncated, foreign or corrupted.
    """
    if len(frame) <= _HEADER.size:
        raise BlobError(f"a chunk of {len(frame)} bytes is shorter than its header of {_HEADER.size}")
    magic, index, size, chunk_bytes, digest = _HEADER.unpack_from(frame)
    if magic != _MAGIC:
        raise BlobError(f"a chunk starts with {magic!r} instead of {_MAGIC!r}; it is not one of Shoal's")
    payload = memoryview(frame)[_HEADER.size :]
    expected = min(chunk_bytes, size - index * chunk_bytes)
    if len(payload) != expected:
        raise BlobError(f"chunk {index} carries {len(payload)} bytes instead of {expected}")
    if hashlib.sha256(payload).digest() != digest:
        raise BlobError(f"chunk {index} does not match its digest")
    return Chunk(index=index, size=size, chunk_bytes=chunk_bytes, payload=payload)


def ranges_of(indices: Iterable[int]) -> Ranges:
    """Compress indices into half-open ranges.

    Example:
        >>> ranges_of([4, 0, 1, 2])
        ((0, 3), (4, 5))
    """
    ranges: list[tuple[int, int]] = []
    for index in sorted(set(indices)):
        if ranges and ranges[-1][1] == index:
            ranges[-1] = (ranges[-1][0], index + 1)
        else:
            ranges.append((index, index + 1))
    return tuple(ranges)


def indices_of(ranges: Ranges, count: int) -> set[int]:
    """Expand half-open ranges, dropping what lies outside a blob of ``count`` chunks.

    Example:
        >>> sorted(indices_of(((0, 2), (3, 9)), 5))
        [0, 1, 3, 4]
    """
    return {i for start, stop in ranges for i in range(max(start, 0), min(stop, count))}


def storage_error(action: str, path: Path, error: OSError) -> StorageError:
    """Explain a failed disk operation.

    Args:
        action: what was tried, as in ``"write"``.
        path: on what.
        error: what the system said.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(
            f"the disk is full: cannot {action} {path}; free some space, nothing already stored is lost"
        )
    return StorageError(f"cannot {action} {path}: {error.strerror or error}")


def _write_all(file: RawIOBase, data: bytes | memoryview) -> None:
    """Write everything; a disk with little room may take only a part at a time before it refuses."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


class PartFile:
    """A blob that is arriving, kept on disk so that a restart goes on where it stopped.

    Two files: ``<path>`` holds the bytes at their places, ``<path>.have`` the indices that were written after their
    bytes, 4 bytes each. A crash between the two costs one chunk.

    Args:
        ref: the blob expected.
        path: the part file; its folder must exist.

    Raises:
        StorageError: the files cannot be opened.
    """

    def __init__(self, ref: BlobRef, path: Path) -> None:
        self.ref = ref
        self.path = path
        self._have_path = path.with_name(path.name + ".have")
        try:
            known = self._have_path.read_bytes() if self._have_path.exists() and path.exists() else b""
            usable = len(known) - len(known) % 4
            self._have = {i for (i,) in struct.iter_unpack(">I", known[:usable]) if i < ref.chunks}
            if not self._have:
                path.write_bytes(b"")
            # Unbuffered: what a full disk did not take must not be tried again, and fail again, on closing.
            self._file = path.open("r+b", buffering=0)
            self._log = self._have_path.open("ab" if self._have else "wb", buffering=0)
            if self._have:
                self._log.truncate(usable)
        except OSError as error:
            raise storage_error("open", path, error) from error

    @property
    def complete(self) -> bool:
        """Every chunk is there."""
        return len(self._have) == self.ref.chunks

    def missing(self) -> Ranges:
        """Half-open ranges of the chunks that are not there yet."""
        return ranges_of(set(range(self.ref.chunks)) - self._have)

    def add(self, chunk: Chunk) -> bool:
        """Keep a chunk.

        Args:
            chunk: verified.

        Returns:
            True if it was new.

        Raises:
            BlobError: the chunk belongs to a blob of another size or cut.
            StorageError: the disk is full or cannot be written; chunks already kept stay.
        """
        if (chunk.size, chunk.chunk_bytes) != (self.ref.size, self.ref.chunk_bytes):
            raise BlobError(
                f"a chunk of a blob of {chunk.size} bytes cut at {chunk.chunk_bytes} came for blob "
                f"{self.ref.digest[:12]} of {self.ref.size} bytes cut at {self.ref.chunk_bytes}"
            )
        if chunk.index in self._have:
            return False
        try:
            self._file.seek(chunk.index * chunk.chunk_bytes)
            _write_all(self._file, chunk.payload)
            _write_all(self._log, struct.pack(">I", chunk.index))
        except OSError as error:
            raise storage_error("write", self.path, error) from error
        self._have.add(chunk.index)
        return True

    def finish(self) -> Path:
        """Verify the whole and close the file.

        Returns:
            The path, ready to be moved to its place.

        Raises:
            BlobError: chunks are missing, or the whole does not match its digest; then the part is dropped, so that
                the next try starts clean.
        """
        if not self.complete:
            raise BlobError(f"blob {self.ref.digest[:12]} still misses chunks {self.missing()}")
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise storage_error("write", self.path, error) from error
        self.close()
        with self.path.open("rb") as file:
            found = (
                hashlib.file_digest(file, "sha256").hexdigest()
                if hasattr(hashlib, "file_digest")
                else digest_of(file.read())
            )
        if found != self.ref.digest:
            self.drop()
            raise BlobError(
                f"the blob has digest {found[:12]} instead of {self.ref.digest[:12]}; it was dropped, fetch it again"
            )
        self._have_path.unlink(missing_ok=True)
        return self.path

    def close(self) -> None:
        """Close the files; what was kept stays on disk."""
        self._file.close()
        self._log.close()

    def drop(self) -> None:
        """Close the files and delete them."""
        self.close()
        self.path.unlink(missing_ok=True)
        self._have_path.unlink(missing_ok=True)
