"""Encodings of updates and weights, which use fewer bits than float32.

An update of ``fp32`` is the new weights. Any other encoding is their difference from the weights
that were sent, all tensors concatenated in the order of the manifest:

- ``fp16``: ``values``, float16.
- ``bf16``: ``values``, uint16: the upper half of float32, with its range and 8 bits of its
  precision.
- ``int8``: ``values``, int8, and ``scales``, one float32 for every 128 values of a tensor; a
  tensor's last block may be shorter. An entry is its value times its block's scale, which is the
  block's largest entry over 127.
- ``int4``: the same with values from -7 to 7, two in a byte, the first in the low half.
- ``topk``: from every tensor, the share ``keep`` of its entries that are largest
  (`fleet_protocol.sparse`). They are encoded as in ``int8``, in their order, with ``gaps``, uint8:
  the number of entries between one and the next; a byte of 255 means that the gap continues in the
  next byte.

``values`` and ``gaps`` of the last two, and ``values`` of ``bf16``, are sent as uint8, first all
lower and then all upper bytes, packed by RFC 1951 (deflate) with Huffman codes only. Packing the
others would gain little.

Weights sent to devices are tensors of the encoded type under their own names, followed by the
``scales`` of all, and by the tensors of `fleet_protocol.units`; `open_weights` returns the first in
float32 again. `fleet_protocol.rounding` rounds the values.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.mapped_tensors import open_tensors
from fleet_protocol.rounding import (
    HALVES,
    LEVELS,
    Floats,
    Vector,
    require_finite,
    restore,
    round_to_levels,
    to_half,
    widen,
)
from fleet_protocol.sparse import count_kept, decode_gaps, encode_gaps, largest_places
from fleet_protocol.weights import BESIDE_PARAMETERS

ENCODINGS = ("fp32", "fp16", "bf16", *LEVELS)
KEEP = 0.1  # of the entries of a tensor, in `topk`

_ENCODING_OF_DTYPE = {"float16": "fp16", "uint16": "bf16", "int8": "int8"}
"""Encodings of weights by the type of their tensors."""

_SCALES = f"{BESIDE_PARAMETERS}scales"
_PACKED: dict[str, dict[str, type[np.generic]]] = {
    "bf16": {"values": np.uint16},
    "int4": {"values": np.int8},
    "topk": {"values": np.int8, "gaps": np.uint8},
}
"""Parts that are sent packed, with their types."""

Tensors = dict[str, NDArray[np.float32]]


def encode(
    difference: Mapping[str, Floats],
    encoding: str,
    *,
    keep: float = KEEP,
    at_random: bool = False,
) -> dict[str, Vector]:
    """Encode the difference of an update to the weights that were sent.

    Args:
        difference: tensors by name, in the order of the manifest.
        encoding: one of `ENCODINGS` except ``fp32``.
        keep: share of the entries that ``topk`` keeps.
        at_random: whether to round at random, which only `LEVELS` can. The random numbers follow
            from the digest of the difference: they are the same wherever it is encoded, and differ
            between devices.

    Raises:
        RefusedError: an entry is not finite, or too large for 16 bits.
    """
    parts = _encode_parts(difference, encoding, keep=keep, at_random=at_random)
    for name in _PACKED.get(encoding, {}):
        parts[name] = _deflate(parts[name])
    return parts


def decode(
    parts: Mapping[str, Vector],
    shapes: Mapping[str, tuple[int, ...]],
    encoding: str,
    *,
    keep: float = KEEP,
) -> Tensors:
    """Decode the output of `encode`.

    Args:
        parts: the output of `encode`.
        shapes: shapes of the tensors by name, in the order of the manifest; only they decide how
            much memory is used.
        encoding: one of `ENCODINGS` except ``fp32``.
        keep: share of the entries that ``topk`` keeps.

    Raises:
        RefusedError: a part is missing, unknown, or of another type or length, a scale is negative
            or not finite, or `topk` does not have the required number of entries for each tensor.
    """
    sizes = [math.prod(shape) for shape in shapes.values()]
    packed = _PACKED.get(encoding, {})
    # No packed part has more than two bytes for each entry.
    most_bytes = 2 * sum(sizes)
    unpacked = {}
    for name, vector in parts.items():
        dtype = packed.get(name)
        unpacked[name] = vector if dtype is None else _inflate(vector, dtype, most_bytes)
    if encoding == "topk":
        flat = _restore_sparse(unpacked, sizes, keep)
    else:
        flat = restore(unpacked, sizes, encoding)
    tensors = {}
    for (name, shape), tensor in zip(shapes.items(), flat, strict=True):
        tensors[name] = tensor.reshape(shape)
    return tensors


def encode_whole(weights: Mapping[str, Floats], encoding: str) -> dict[str, Vector]:
    """Encode weights for devices in ``fp32``, ``fp16``, ``bf16`` or ``int8``.

    `open_weights` reads them.

    Raises:
        RefusedError: an entry is not finite, or too large for float16.
    """
    if encoding == "fp32":
        return dict(weights)
    parts = _encode_parts(weights, encoding)
    # `np.split` takes the positions between the tensors.
    ends = np.cumsum([tensor.size for tensor in weights.values()])[:-1]
    flat = np.split(parts["values"], ends)
    encoded = {}
    for (name, tensor), values in zip(weights.items(), flat, strict=True):
        encoded[name] = values.reshape(tensor.shape)
    if "scales" in parts:
        encoded[_SCALES] = parts["scales"]
    return encoded


def open_weights(path: Path) -> Mapping[str, Vector]:
    """Return weights that were sent to a device, by name.

    They are views of a mapped file, or new float32 arrays if they are encoded.

    Raises:
        BlobError: the file does not exist, or is damaged.
        RefusedError: it cannot be decoded.
    """
    tensors = open_tensors(path)
    scales = tensors.get(_SCALES)
    encoded: dict[str, Vector] = {}
    for name, tensor in tensors.items():
        if not name.startswith(BESIDE_PARAMETERS):
            encoded[name] = tensor
    first = next(iter(encoded.values()), None)
    # All tensors have one type, so the first one shows the encoding.
    encoding = None if first is None else _ENCODING_OF_DTYPE.get(first.dtype.name)
    # Float32 weights stay mapped from the file.
    if encoding is None:
        return encoded
    parts = {"values": np.concatenate([tensor.reshape(-1) for tensor in encoded.values()])}
    if scales is not None:
        parts["scales"] = scales
    flat = restore(parts, [tensor.size for tensor in encoded.values()], encoding)
    weights = {}
    for (name, tensor), values in zip(encoded.items(), flat, strict=True):
        weights[name] = values.reshape(tensor.shape)
    return weights


def _encode_parts(
    difference: Mapping[str, Floats],
    encoding: str,
    *,
    keep: float = KEEP,
    at_random: bool = False,
) -> dict[str, Vector]:
    """Return the parts of an encoding before they are packed."""
    flat = {name: tensor.reshape(-1) for name, tensor in difference.items()}
    if encoding not in LEVELS:
        return {"values": _encode_halves(flat, encoding)}
    if encoding != "topk":
        return round_to_levels(flat, encoding, at_random=at_random)
    start = 0
    # An empty array, so that a model without tensors can be joined.
    all_places = [np.zeros(0, np.int64)]
    kept = {}
    for name, tensor in flat.items():
        places = largest_places(tensor, count_kept(tensor.size, keep))
        kept[name] = tensor[places]
        all_places.append(places + start)
        start += tensor.size
    # Positions count over all tensors, so that most gaps fit into a byte.
    gaps = encode_gaps(np.concatenate(all_places))
    return {"gaps": gaps, **round_to_levels(kept, encoding, at_random=at_random)}


def _encode_halves(flat: Mapping[str, Floats], encoding: str) -> Vector:
    halves = [np.zeros(0, HALVES[encoding])]
    for name, tensor in flat.items():
        half = to_half(tensor, encoding)
        # The first check matters for bf16, whose rounding may turn a NaN into a number.
        require_finite(tensor, name, encoding)
        require_finite(widen(half), name, encoding)
        halves.append(half)
    return np.concatenate(halves)


def _restore_sparse(
    parts: Mapping[str, Vector],
    sizes: Sequence[int],
    keep: float,
) -> list[Floats]:
    """Return flat tensors that are zero except for the kept entries."""
    kept = [count_kept(size, keep) for size in sizes]
    values = [np.zeros(0, np.float32), *restore(parts, kept, "topk")]
    # Allocated by the shapes of the manifest, whatever the update announces.
    joined = np.zeros(sum(sizes), np.float32)
    joined[decode_gaps(parts["gaps"], sizes, kept)] = np.concatenate(values)
    ends = np.cumsum([0, *sizes])
    return [joined[start:stop] for start, stop in pairwise(ends)]


def _deflate(part: Vector) -> NDArray[np.uint8]:
    """Pack a part, first all lower bytes of its numbers and then all upper ones."""
    # Huffman codes only: repeated strings are rare, and searching for them takes most of the time.
    deflate = zlib.compressobj(wbits=-15, memLevel=9, strategy=zlib.Z_HUFFMAN_ONLY)
    by_byte = part.view(np.uint8).reshape(-1, part.itemsize).T
    packed = deflate.compress(by_byte.tobytes()) + deflate.flush()
    return np.frombuffer(packed, np.uint8)


def _inflate(
    part: Vector,
    kind: type[np.generic],
    most_bytes: int,
) -> Vector:
    """Return the input of `_deflate`.

    Raises:
        RefusedError: it has more bytes than `most_bytes`, or is not the output of `_deflate`.
    """
    inflate = zlib.decompressobj(wbits=-15)
    item_bytes = np.dtype(kind).itemsize
    try:
        # One byte more than allowed shows that there are more.
        unpacked = inflate.decompress(part.tobytes(), most_bytes + 1)
    except zlib.error as error:
        raise RefusedError(
            RefusalReason.BAD_SHAPE, f"the packed part cannot be unpacked: {error}"
        ) from error
    is_bytes = part.dtype == np.uint8 and part.ndim == 1
    # Bytes after the end would be another encoding of the same update.
    is_whole = inflate.eof and not inflate.unused_data and len(unpacked) % item_bytes == 0
    if not is_bytes or not is_whole:
        raise RefusedError(
            RefusalReason.BAD_SHAPE,
            f"the packed part is {part.dtype.name} of {part.shape}, not a vector of uint8 "
            f"that unpacks to at most {most_bytes} bytes, {item_bytes} a number",
        )
    by_byte = np.frombuffer(unpacked, np.uint8).reshape(item_bytes, -1)
    return np.ascontiguousarray(by_byte.T).reshape(-1).view(kind)
