"""Blobs in chunks: framing, a digest per chunk and per blob, missing ranges, and a part file that
survives restarts.

A chunk travels as one binary payload, all integers big-endian:

    offset  bytes  content
    0       4      magic "SHC2"; "SHC3" where it carries no digest of its own; "SHC4" where it is packed besides
    4       4      index of the chunk
    8       8      size of the blob
    16      4      payload bytes of every chunk but the last
    20      32     BLAKE3 of the payload; not there where the transport, or the digest of the blob, must do
    52, 20  ...    payload

Packed is what repeats itself, as graphs do: RFC 1951 (deflate) of the payload.

Brokers drop queued messages silently when a queue overflows, so completeness is ours: the receiver
keeps what it has, knows what it misses, and asks for that.
"""

import errno
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fleet_protocol.digests import blob_digest, chunk_digest, file_matches, matches
from fleet_protocol.errors import BlobError, StorageError
from fleet_protocol.messages import BlobRef, Ranges, bounds

DEFAULT_CHUNK_BYTES = bounds.DEFAULT_CHUNK_BYTES

_MAGIC = b"SHC2"
_BARE = b"SHC3"
_PACKED = b"SHC4"
_HEADER = struct.Struct(">4sIQI")
_DIGEST_BYTES = 32
BARE_OVERHEAD = _HEADER.size
FRAME_OVERHEAD = _HEADER.size + _DIGEST_BYTES
_PROBE_BYTES = 1024  # in the middle of a chunk
_WORTH = 0.7  # of the probe: graphs and manifests leave 0.15 to 0.64, weights and updates 0.98
# of 256 that a byte of a probe may have: what is worth packing has up to 208, weights from 225 on
_MANY_VALUES = 216
_MARK = b"\x01"


@dataclass(frozen=True)
class Chunk:
    """One verified chunk: its place, from 0, bytes of the whole blob, and payload bytes of every
    chunk but the last.
    """

    index: int
    size: int
    chunk_bytes: int
    payload: memoryview


def blob_ref(data: bytes | memoryview, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> BlobRef:
    """Name a whole blob by its content."""
    return BlobRef(digest=blob_digest(data), size=len(data), chunk_bytes=chunk_bytes)


def encode_chunk(
    data: bytes | memoryview,
    index: int,
    chunk_bytes: int,
    *,
    digest: bool = True,
    pack: bool = False,
) -> bytes:
    """Frame one chunk of a whole blob, with a digest of its own where it needs one.

    Others may be packed.
    """
    payload = memoryview(data)[index * chunk_bytes : (index + 1) * chunk_bytes]
    magic, found = (_MAGIC, chunk_digest(payload)) if digest else (_BARE, b"")
    if pack and not digest and _repeats(payload):
        deflate = zlib.compressobj(wbits=-zlib.MAX_WBITS)
        magic = _PACKED
        payload = memoryview(deflate.compress(payload) + deflate.flush())
    return b"".join((_HEADER.pack(magic, index, len(data), chunk_bytes), found, payload))


def _repeats(payload: memoryview) -> bool:
    start = max(0, (len(payload) - _PROBE_BYTES) // 2)
    probe = payload[start : start + _PROBE_BYTES]
    if np.count_nonzero(np.bincount(np.frombuffer(probe, np.uint8))) > _MANY_VALUES:
        return False  # to begin to compress costs a dozen times as much
    return len(zlib.compress(probe, 1)) < _WORTH * len(probe)


def iter_chunks(
    data: bytes | memoryview,
    chunk_bytes: int,
    ranges: Ranges,
    *,
    digests: bool = True,
    pack: bool = False,
) -> Iterator[tuple[int, bytes]]:
    """Frame the chunks of some half-open ranges, by index in order.

    What is beyond the blob is skipped.
    """
    count = -(-len(data) // chunk_bytes)
    for start, stop in ranges:
        for index in range(max(start, 0), min(stop, count)):
            yield (
                index,
                encode_chunk(data, index, chunk_bytes, digest=digests, pack=pack),
            )


def decode_chunk(frame: bytes) -> Chunk:
    """Verify the frame in one MQTT message.

    A BlobError for one that is truncated, foreign or corrupted.
    """
    start = _HEADER.size if frame.startswith((_BARE, _PACKED)) else FRAME_OVERHEAD
    if len(frame) <= start:
        raise BlobError(f"a chunk of {len(frame)} bytes is shorter than its header of {start}")
    magic, index, size, chunk_bytes = _HEADER.unpack_from(frame)
    if magic not in {_MAGIC, _BARE, _PACKED}:
        raise BlobError(
            f"a chunk starts with {magic!r} instead of {_MAGIC!r}; it is not one of Shoal's"
        )
    if (
        chunk_bytes > bounds.MOST_CHUNK_BYTES
    ):  # or a few packed bytes would unpack into as many as they say
        raise BlobError(
            f"a chunk says that it may have {chunk_bytes} bytes; {bounds.MOST_CHUNK_BYTES} are taken"
        )
    payload = memoryview(frame)[start:]
    digest = frame[_HEADER.size : start]
    expected = min(chunk_bytes, size - index * chunk_bytes)
    if magic == _PACKED:
        payload = _unpacked(payload, index, expected)
    if len(payload) != expected:
        raise BlobError(f"chunk {index} carries {len(payload)} bytes instead of {expected}")
    if digest and chunk_digest(payload) != digest:  # without one, that of the whole blob must do
        raise BlobError(f"chunk {index} does not match its digest")
    return Chunk(index=index, size=size, chunk_bytes=chunk_bytes, payload=payload)


def _unpacked(packed: memoryview, index: int, expected: int) -> memoryview:
    """No more than a byte beyond what is expected, however much a stranger packed."""
    inflate = zlib.decompressobj(wbits=-zlib.MAX_WBITS)
    try:
        found = inflate.decompress(packed, max(0, expected) + 1)
    except zlib.error as error:
        raise BlobError(f"chunk {index} cannot be unpacked: {error}") from error
    if not inflate.eof or inflate.unused_data:
        raise BlobError(f"chunk {index} is packed into another number of bytes than {expected}")
    return memoryview(found)


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
    """Explain a failed disk operation, whose verb `action` is."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(
            f"the disk is full: cannot {action} {path}; free some space, nothing already stored is lost"
        )
    return StorageError(f"cannot {action} {path}: {error.strerror or error}")


@contextmanager
def disk_errors(action: str, path: Path) -> Iterator[None]:
    """Explain what fails on the disk inside this, by :func:`storage_error`."""
    try:
        yield
    except OSError as error:
        raise storage_error(action, path, error) from error


def write_all(descriptor: int, data: bytes | memoryview, at: int) -> None:
    """Write everything.

    A disk with little room may take only a part at a time before it refuses.
    """
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, at)
        left = left[written:]
        at = at + written


class PartFile:
    """A blob that is arriving, kept on disk, in a folder that exists, so that a restart goes on
    where it stopped.

    The file holds the bytes at their places and, behind the whole blob, a byte for each chunk,
    which is set after its bytes were written. A crash between the two costs one chunk. One of
    another size or cut is begun anew; that it cannot be opened is a StorageError.
    """

    def __init__(self, ref: BlobRef, path: Path) -> None:
        self.ref = ref
        self.path = path
        self._have: set[int] = set()
        with disk_errors("open", path):
            # Unbuffered: what a full disk did not take must not be tried again, and fail again, on
            # closing.
            self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
            size = self._file.seek(0, os.SEEK_END)
            if ref.size < size <= ref.size + ref.chunks:
                marks = os.pread(self._file.fileno(), ref.chunks, ref.size)
                self._have = {index for index, mark in enumerate(marks) if mark == _MARK[0]}
            if not self._have and size > ref.size:  # what is below is written over
                self._file.truncate(ref.size)

    @property
    def complete(self) -> bool:
        """Every chunk is there."""
        return len(self._have) == self.ref.chunks

    def missing(self) -> Ranges:
        """Half-open ranges of the chunks that are not there yet."""
        gaps = []
        next_wanted = 0
        for index in (*sorted(self._have), self.ref.chunks):
            if index > next_wanted:
                gaps.append((next_wanted, index))
            next_wanted = index + 1
        return tuple(gaps)

    def add(self, chunk: Chunk) -> bool:
        """Keep a chunk; True if it was new.

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
        self._write(chunk)
        self._have.add(chunk.index)
        return True

    def _write(self, chunk: Chunk) -> None:
        with disk_errors("write", self.path):
            write_all(self._file.fileno(), chunk.payload, chunk.index * chunk.chunk_bytes)
            write_all(self._file.fileno(), _MARK, self.ref.size + chunk.index)

    def finish(self) -> Path:
        """Verify the whole, of any size, and close the file, which is safe from a power cut then.

        Returns:
            The path, ready to be moved to its place.

        Raises:
            BlobError: chunks are missing, or the whole does not match its digest; then the part is
                dropped, so that the next try starts clean.
        """
        self._end()
        with disk_errors("write", self.path):
            os.fsync(self._file.fileno())
            self.close()
            intact = file_matches(self.path, self.ref.digest)
        self._require(intact)
        return self.path

    def take(self) -> bytes:
        """Verify the whole and close the file; its bytes, which the caller sees to.

        Errors are those of `finish`.
        """
        self._end()
        with disk_errors("read", self.path):
            self._file.seek(0)
            data = self._file.read()
            self.close()
        self._require(matches(data, self.ref.digest))
        return data

    def _end(self) -> None:
        if not self.complete:
            raise BlobError(f"blob {self.ref.digest[:12]} still misses chunks {self.missing()}")
        with disk_errors("write", self.path):
            self._file.truncate(self.ref.size)

    def _require(self, intact: object) -> None:
        if not intact:
            self.drop()
            raise BlobError(
                f"the blob does not have the digest {self.ref.digest[:12]}; it was dropped, fetch it again"
            )

    def close(self) -> None:
        """Close the file; what was kept stays on disk."""
        self._file.close()

    def drop(self) -> None:
        """Close the file and delete it."""
        self.close()
        self.path.unlink(missing_ok=True)
