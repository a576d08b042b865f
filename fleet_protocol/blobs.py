"""Blobs in chunks: the frames of chunks, and ranges of missing ones.

A chunk is sent as one binary payload, all integers big-endian:

    offset  bytes  content
    0       4      magic "SHC2"; "SHC3" for a chunk without a digest; "SHC4" for a packed one
    4       4      index of the chunk
    8       8      size of the blob
    16      4      payload bytes of every chunk but the last
    20      32     BLAKE3 of the payload; only with "SHC2"
    52, 20  ...    payload

A chunk needs no digest if the transport is authentic, or if the digest of the whole blob is checked
anyway. Chunks of repetitive blobs, such as graphs, are packed: RFC 1951 (deflate) of the payload.

Brokers drop queued messages silently when a queue overflows, so the receiver is responsible for
completeness: it keeps the chunks that arrived (`fleet_protocol.part_file`), and requests the
others.
"""

import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from fleet_protocol.digests import blob_digest, chunk_digest
from fleet_protocol.errors import BlobError
from fleet_protocol.messages import BlobRef, Ranges, bounds

DEFAULT_CHUNK_BYTES = bounds.DEFAULT_CHUNK_BYTES

_WITH_DIGEST = b"SHC2"
_BARE = b"SHC3"
_PACKED = b"SHC4"
_HEADER = struct.Struct(">4sIQI")
_DIGEST_BYTES = 32
BARE_OVERHEAD = _HEADER.size
FRAME_OVERHEAD = _HEADER.size + _DIGEST_BYTES

_PROBE_BYTES = 1024  # in the middle of a chunk
# Largest share of a probe after packing: graphs and manifests leave 0.15 to 0.64, weights and
# updates 0.98.
_WORTH = 0.7
# Most different byte values in a probe: blobs that are worth packing have up to 208, weights 225 or
# more.
_MANY_VALUES = 216


@dataclass(frozen=True)
class Chunk:
    """One verified chunk.

    Attributes:
        index: its position in the blob, from 0.
        size: bytes of the whole blob.
        chunk_bytes: payload bytes of every chunk except the last.
        payload: its part of the blob.
    """

    index: int
    size: int
    chunk_bytes: int
    payload: memoryview


def blob_ref(data: bytes | memoryview, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> BlobRef:
    """Return the reference to a whole blob."""
    return BlobRef(digest=blob_digest(data), size=len(data), chunk_bytes=chunk_bytes)


def encode_chunk(
    data: bytes | memoryview,
    index: int,
    chunk_bytes: int,
    *,
    digest: bool = True,
    pack: bool = False,
) -> bytes:
    """Return the frame of one chunk.

    Args:
        data: the whole blob.
        index: index of the chunk.
        chunk_bytes: payload bytes of every chunk except the last.
        digest: whether the frame has a digest of the chunk.
        pack: whether the payload may be packed if it has no digest.
    """
    payload = memoryview(data)[index * chunk_bytes : (index + 1) * chunk_bytes]
    return frame_chunk(Chunk(index, len(data), chunk_bytes, payload), digest=digest, pack=pack)


def frame_chunk(chunk: Chunk, *, digest: bool = True, pack: bool = False) -> bytes:
    """Return the frame of a chunk; the options are those of `encode_chunk`."""
    payload = chunk.payload
    magic = _WITH_DIGEST if digest else _BARE
    payload_digest = chunk_digest(payload) if digest else b""
    if pack and not digest and _is_worth_packing(payload):
        deflate = zlib.compressobj(wbits=-zlib.MAX_WBITS)
        magic = _PACKED
        payload = memoryview(deflate.compress(payload) + deflate.flush())
    header = _HEADER.pack(magic, chunk.index, chunk.size, chunk.chunk_bytes)
    return b"".join((header, payload_digest, payload))


def iter_chunks(
    data: bytes | memoryview,
    chunk_bytes: int,
    ranges: Ranges,
    *,
    digests: bool = True,
    pack: bool = False,
) -> Iterator[tuple[int, bytes]]:
    """Yield index and frame of the chunks of some half-open ranges, in order.

    Ranges beyond the blob are skipped. The other arguments are those of `encode_chunk`.
    """
    # Rounded up: the last chunk may be shorter.
    count = -(-len(data) // chunk_bytes)
    for start, stop in ranges:
        for index in range(max(start, 0), min(stop, count)):
            yield (
                index,
                encode_chunk(
                    data,
                    index,
                    chunk_bytes,
                    digest=digests,
                    pack=pack,
                ),
            )


def decode_chunk(frame: bytes) -> Chunk:
    """Verify the frame of a chunk.

    Raises:
        BlobError: it is truncated, foreign or corrupted.
    """
    has_digest = not frame.startswith((_BARE, _PACKED))
    start = FRAME_OVERHEAD if has_digest else BARE_OVERHEAD
    if len(frame) <= start:
        raise BlobError(f"a chunk of {len(frame)} bytes is shorter than its header of {start}")
    magic, index, size, chunk_bytes = _HEADER.unpack_from(frame)
    if magic not in {_WITH_DIGEST, _BARE, _PACKED}:
        raise BlobError(
            f"a chunk starts with {magic!r} instead of {_WITH_DIGEST!r}; it is not one of Shoal's"
        )
    # Otherwise a few packed bytes could unpack into as many as the frame announces.
    if chunk_bytes > bounds.MOST_CHUNK_BYTES:
        raise BlobError(
            f"a chunk announces a size of {chunk_bytes} bytes; at most "
            f"{bounds.MOST_CHUNK_BYTES} are accepted"
        )
    payload = memoryview(frame)[start:]
    # Negative for an index beyond the blob, which matches no payload.
    expected = min(chunk_bytes, size - index * chunk_bytes)
    if magic == _PACKED:
        payload = _unpack(payload, index, expected)
    if len(payload) != expected:
        raise BlobError(f"chunk {index} has {len(payload)} bytes instead of {expected}")
    if has_digest and chunk_digest(payload) != frame[_HEADER.size : start]:
        raise BlobError(f"chunk {index} does not match its digest")
    return Chunk(index=index, size=size, chunk_bytes=chunk_bytes, payload=payload)


def _is_worth_packing(payload: memoryview) -> bool:
    start = max(0, (len(payload) - _PROBE_BYTES) // 2)
    probe = payload[start : start + _PROBE_BYTES]
    # Counting values first: starting a compression takes a dozen times as long.
    counts = np.bincount(np.frombuffer(probe, np.uint8))
    if np.count_nonzero(counts) > _MANY_VALUES:
        return False
    return len(zlib.compress(probe, 1)) < _WORTH * len(probe)


def _unpack(
    packed: memoryview,
    index: int,
    expected: int,
) -> memoryview:
    """Unpack a payload, at most one byte more than expected, however much it would unpack to."""
    inflate = zlib.decompressobj(wbits=-zlib.MAX_WBITS)
    try:
        payload = inflate.decompress(packed, max(0, expected) + 1)
    except zlib.error as error:
        raise BlobError(f"chunk {index} cannot be unpacked: {error}") from error
    if not inflate.eof or inflate.unused_data:
        raise BlobError(f"chunk {index} does not unpack to {expected} bytes")
    return memoryview(payload)


def ranges_of(indices: Iterable[int]) -> Ranges:
    """Return indices as half-open ranges.

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
    """Return the indices of half-open ranges that exist in a blob of ``count`` chunks.

    Example:
        >>> sorted(indices_of(((0, 2), (3, 9)), 5))
        [0, 1, 3, 4]
    """
    indices: set[int] = set()
    for start, stop in ranges:
        indices.update(range(max(start, 0), min(stop, count)))
    return indices
