"""Encodings of updates and weights: what a device learnt, and what it begins with, in fewer bits
than float32 has.

An update of ``fp32`` is the new weights. Any other is their difference to the weights that were
sent, all tensors one after the other in the order of the manifest:

- ``fp16``: ``values``, float16.
- ``bf16``: ``values``, uint16: the upper half of float32, which has its range and 8 bits of its
  precision.
- ``int8``: ``values``, int8, and ``scales``, one float32 for every 128 values of a tensor; a
  tensor's last block may be shorter. An entry is its value times its block's scale, which is the
  block's largest entry over 127.
- ``int4``: the same from -7 to 7, of two values a byte, the first in the low half.
- ``topk``: of every tensor the share ``keep`` of its entries that is largest, and of equal ones the
  first (Stich, Cordonnier and Jaggi, NeurIPS 2018, https://arxiv.org/abs/1809.07599; by tensor as
  Lin, Han, Mao, Wang and Dally, ICLR 2018, https://arxiv.org/abs/1712.01887). These as ``int8`` has
  them, in their order, and ``gaps``, uint8: how many entries of the whole lie between one and the
  next, 255 for as many of them where the gap goes on in the next byte.

``values`` and ``gaps`` of the last two, and ``values`` of ``bf16``, first all lower and then all
upper bytes, travel packed as uint8: RFC 1951 (deflate), of which Huffman codes alone. The others
would gain little.

Weights on their way to devices are tensors of the encoded type under their own names, with the
``scales`` of all behind them; whoever opens them has float32 again.

Values are rounded to the nearest, or at random, up or down with the probability that keeps their
expectation (QSGD: Alistarh, Grubic, Li, Tomioka and Vojnovic, NeurIPS 2017,
https://arxiv.org/abs/1610.02132).
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.digests import blob_digest
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.mapped_tensors import open_tensors

LEVELS = {"int8": 127, "int4": 7, "topk": 127}
"""Of the encodings that are rounded so much that what was lost matters: the largest value."""

ENCODINGS = ("fp32", "fp16", "bf16", *LEVELS)
KEEP = 0.1  # of the entries of a tensor, in `topk`

_SENT = {
    "float16": "fp16",
    "uint16": "bf16",
    "int8": "int8",
}  # encodings of weights, by what their tensors are
_HALF = {"fp16": "float16", "bf16": "uint16"}
_SCALES = "/scales"  # no name of a parameter
_BLOCK = 128
_PACKED: dict[str, dict[str, type[np.generic]]] = {
    "bf16": {"values": np.uint16},
    "int4": {"values": np.int8},
    "topk": {"values": np.int8, "gaps": np.uint8},
}
_MORE = 255  # entries, and the gap goes on

Tensors = dict[str, NDArray[np.float32]]


def _blocks(size: int) -> int:
    return -(-size // _BLOCK)


def encode(
    difference: Mapping[str, NDArray[np.float32]],
    encoding: str,
    *,
    keep: float = KEEP,
    at_random: bool = False,
) -> dict[str, NDArray[Any]]:
    """Write a difference, by name in the order of the manifest, as vectors in one of `ENCODINGS`
    but ``fp32``.

    At random (`LEVELS` alone) it is rounded by numbers that follow from the digest of the
    difference: the same wherever it is encoded, and others on every device.

    Raises:
        RefusedError: an entry is not finite, or too large for 16 bits.
    """
    parts = _parts(difference, encoding, keep, at_random)
    packed = _PACKED.get(encoding, {})
    return {name: _deflated(part) if name in packed else part for name, part in parts.items()}


def _parts(
    difference: Mapping[str, NDArray[np.float32]],
    encoding: str,
    keep: float = KEEP,
    at_random: bool = False,
) -> dict[str, NDArray[Any]]:
    flat = {name: tensor.reshape(-1) for name, tensor in difference.items()}
    if encoding not in LEVELS:
        halves = [np.zeros(0, _HALF[encoding])]
        for name, tensor in flat.items():
            halves.append(_half(tensor, encoding))
            for seen in (tensor, _widened(halves[-1])):
                _require_finite(seen, name, encoding)
        return {"values": np.concatenate(halves)}
    if encoding != "topk":
        return _in_steps(flat, encoding, at_random)
    places = {name: _largest(tensor, _kept(tensor.size, keep)) for name, tensor in flat.items()}
    starts = np.cumsum([0, *(tensor.size for tensor in flat.values())])
    whole = [place + start for place, start in zip(places.values(), starts, strict=False)]
    kept = {name: tensor[places[name]] for name, tensor in flat.items()}
    return {
        "gaps": _gaps(np.concatenate([np.zeros(0, np.int64), *whole])),
        **_in_steps(kept, encoding, at_random),
    }


def _deflated(part: NDArray[Any]) -> NDArray[np.uint8]:
    deflate = zlib.compressobj(wbits=-15, memLevel=9, strategy=zlib.Z_HUFFMAN_ONLY)
    bytewise = part.view(np.uint8).reshape(-1, part.itemsize).T
    return np.frombuffer(deflate.compress(bytewise.tobytes()) + deflate.flush(), np.uint8)


def _inflated(part: NDArray[Any], kind: type[np.generic], most: int) -> NDArray[Any]:
    """What `_deflated` was given, of so many bytes at most.

    A RefusedError for more, or for what it did not make.
    """
    inflate = zlib.decompressobj(wbits=-15)
    item = np.dtype(kind).itemsize
    try:
        found = inflate.decompress(part.tobytes(), most + 1)
    except zlib.error as error:
        raise RefusedError(
            RefusalReason.BAD_SHAPE, f"what is packed cannot be unpacked: {error}"
        ) from error
    if (
        part.dtype != np.uint8
        or part.ndim != 1
        or not inflate.eof
        or inflate.unused_data
        or len(found) % item
    ):
        raise RefusedError(
            RefusalReason.BAD_SHAPE,
            f"what is packed is {part.dtype.name} of {part.shape}, and no vector of uint8 that unpacks to {most} bytes"
            f" at most, {item} a number",
        )
    return (
        np.ascontiguousarray(np.frombuffer(found, np.uint8).reshape(item, -1).T)
        .reshape(-1)
        .view(kind)
    )


def _half(tensor: NDArray[np.float32], encoding: str) -> NDArray[Any]:
    """In 16 bits, rounded to the nearest and of two that are as near to the even one."""
    if encoding == "fp16":
        with np.errstate(over="ignore"):
            return tensor.astype(np.float16)
    bits = tensor.view(np.uint32)
    return ((bits + ((bits >> 16 & 1) + 0x7FFF)) >> 16).astype(np.uint16)


def _widened(halves: NDArray[Any]) -> NDArray[np.float32]:
    if halves.dtype == np.uint16:
        return (halves.astype(np.uint32) << 16).view(np.float32)
    return halves.astype(np.float32)


def _in_steps(
    flat: Mapping[str, NDArray[np.float32]], encoding: str, at_random: bool
) -> dict[str, NDArray[Any]]:
    top = LEVELS[encoding]
    draw = None
    if at_random:
        digest = blob_digest(*(tensor.tobytes() for tensor in flat.values()))
        draw = np.random.Generator(np.random.PCG64(np.random.SeedSequence(int(digest[-32:], 16))))
    values = [np.zeros(0, np.int8)]
    scales = [np.zeros(0, np.float32)]
    for name, tensor in flat.items():
        blocks = np.zeros((_blocks(tensor.size), _BLOCK), np.float32)
        blocks.reshape(-1)[: tensor.size] = tensor
        scales.append(np.abs(blocks).max(axis=1) / np.float32(top))
        _require_finite(scales[-1], name, encoding)
        blocks /= np.where(scales[-1] > 0, scales[-1], 1)[:, None]
        rounded = (
            np.rint(blocks)
            if draw is None
            else np.floor(blocks + draw.random(blocks.shape, np.float32))
        )
        values.append(np.clip(rounded, -top, top).reshape(-1)[: tensor.size].astype(np.int8))
    whole = np.concatenate(values)
    if encoding == "int4":
        nibbles = np.append(whole, np.zeros(whole.size % 2, np.int8)) & 15
        whole = nibbles[::2] | nibbles[1::2] << 4
    return {"values": whole, "scales": np.concatenate(scales)}


def _kept(size: int, keep: float) -> int:
    return math.ceil(size * keep)


def _largest(tensor: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Where the entries are that are largest without their sign, in rising order.

    What is no number is largest.
    """
    if not count:
        return np.zeros(0, np.int64)
    sizes = np.abs(tensor)
    np.nan_to_num(sizes, copy=False, nan=np.inf, posinf=np.inf)
    least = np.partition(sizes, -count)[-count]
    chosen = sizes > least
    chosen[np.flatnonzero(sizes == least)[: count - np.count_nonzero(chosen)]] = True
    found: NDArray[np.int64] = np.flatnonzero(chosen)
    return found


def _gaps(places: NDArray[np.int64]) -> NDArray[np.uint8]:
    between = np.diff(places, prepend=-1) - 1
    ends = np.cumsum(between // _MORE + 1)
    gaps = np.full(ends[-1] if ends.size else 0, _MORE, np.uint8)
    gaps[ends - 1] = between % _MORE
    return gaps


def _places(gaps: NDArray[Any], sizes: Sequence[int], kept: Sequence[int]) -> NDArray[np.int64]:
    """What `_gaps` was made of.

    A RefusedError if that was not as many entries of each tensor as are kept.
    """
    last = gaps != _MORE
    places: NDArray[np.int64] = np.cumsum(gaps.astype(np.int64) + last)[last] - 1
    found = np.diff(np.searchsorted(places, np.cumsum([0, *sizes])))
    if found.tolist() != list(kept) or places.size != sum(kept) or (gaps.size and not last[-1]):
        raise RefusedError(
            RefusalReason.BAD_SHAPE,
            f"the gaps of what is in topk name {places.size} entries, {found.tolist()} of its tensors, where"
            f" {list(kept)} of {list(sizes)} are kept",
        )
    return places


def _require_finite(found: NDArray[Any], name: str, encoding: str) -> None:
    if not np.isfinite(found).all():
        raise RefusedError(
            RefusalReason.NOT_FINITE,
            f"what is to be sent of tensor {name} is not finite, or too large for {encoding}; train with a smaller"
            ' learning rate, or take encoding = "fp32" in [upload] or [download]',
        )


def decode(
    parts: Mapping[str, NDArray[Any]],
    shapes: Mapping[str, tuple[int, ...]],
    encoding: str,
    *,
    keep: float = KEEP,
) -> Tensors:
    """Read what `encode` wrote.

    The shapes, in the order of the manifest, alone decide how much memory is taken.

    Raises:
        RefusedError: a part is missing, foreign, or of another type or length, a scale is negative
            or not finite, or the entries of `topk` are not as many of each tensor as are kept.
    """
    sizes = [math.prod(shape) for shape in shapes.values()]
    packed = _PACKED.get(encoding, {})
    most = 2 * sum(sizes)
    parts = {
        name: _inflated(part, packed[name], most) if name in packed else part
        for name, part in parts.items()
    }
    if encoding != "topk":
        flat = _read(parts, sizes, encoding)
    else:
        kept = [_kept(size, keep) for size in sizes]
        values = np.concatenate([np.zeros(0, np.float32), *_read(parts, kept, encoding)])
        whole = np.zeros(sum(sizes), np.float32)
        whole[_places(parts["gaps"], sizes, kept)] = values
        flat = [whole[start:stop] for start, stop in pairwise(np.cumsum([0, *sizes]))]
    return {
        name: tensor.reshape(shape)
        for (name, shape), tensor in zip(shapes.items(), flat, strict=True)
    }


def _read(
    parts: Mapping[str, NDArray[Any]], sizes: Sequence[int], encoding: str
) -> list[NDArray[np.float32]]:
    """The values of tensors of these sizes, without their places."""
    count = sum(sizes)
    expected = {
        "values": (
            _HALF.get(encoding, "int8"),
            -(-count // 2) if encoding == "int4" else count,
        )
    }
    if encoding in LEVELS:
        expected["scales"] = ("float32", sum(map(_blocks, sizes)))
    if encoding == "topk":
        expected["gaps"] = (
            "uint8",
            parts["gaps"].size if "gaps" in parts else count,
        )  # `_places` sees how many
    found = {name: (part.dtype.name, part.size) for name, part in parts.items() if part.ndim == 1}
    if found != expected or len(parts) != len(found):
        raise RefusedError(
            RefusalReason.BAD_SHAPE,
            f"what is in {encoding} has {expected}, this {found}",
        )
    values = parts["values"]
    if encoding == "int4":
        values = ((np.stack([values & 15, values >> 4 & 15], axis=1).reshape(-1)[:count]) ^ 8) - 8
    scales = parts.get("scales", np.zeros(0, np.float32))
    if not (np.isfinite(scales) & (scales >= 0)).all():
        raise RefusedError(
            RefusalReason.NOT_FINITE,
            f"what is in {encoding} has a scale that is negative or no number",
        )
    ends, marks = (np.cumsum([0, *items]).tolist() for items in (sizes, map(_blocks, sizes)))
    result = []
    for (start, stop), (first, last) in zip(pairwise(ends), pairwise(marks), strict=True):
        tensor = _widened(values[start:stop])
        if encoding in LEVELS:
            with np.errstate(
                over="ignore"
            ):  # what is not finite then is found where the whole update is checked
                tensor *= np.repeat(scales[first:last], _BLOCK)[: stop - start]
        result.append(tensor)
    return result


def encode_whole(
    weights: Mapping[str, NDArray[np.float32]], encoding: str
) -> dict[str, NDArray[Any]]:
    """Write weights as devices are sent them, in ``fp32``, ``fp16``, ``bf16`` or ``int8``.

    `open_weights` reads them.

    Raises:
        RefusedError: an entry is not finite, or too large for float16.
    """
    if encoding == "fp32":
        return dict(weights)
    parts = _parts(weights, encoding)
    ends = np.cumsum([tensor.size for tensor in weights.values()])[:-1]
    named = zip(weights.items(), np.split(parts["values"], ends), strict=True)
    whole = {name: values.reshape(tensor.shape) for (name, tensor), values in named}
    return whole | ({_SCALES: parts["scales"]} if "scales" in parts else {})


def open_weights(path: Path) -> Mapping[str, NDArray[Any]]:
    """Weights as a device was sent them, by name: views of a mapped file, or where they are encoded
    float32 of its own.

    Raises:
        BlobError: the file is not there, or is damaged.
        RefusedError: it cannot be decoded.
    """
    found = open_tensors(path)
    scales = found.pop(_SCALES, None)
    encoding = _SENT.get(next((tensor.dtype.name for tensor in found.values()), ""))
    if encoding is None:
        return found
    parts = {"values": np.concatenate([tensor.reshape(-1) for tensor in found.values()])}
    flat = _read(
        parts if scales is None else parts | {"scales": scales},
        [tensor.size for tensor in found.values()],
        encoding,
    )
    return {
        name: values.reshape(tensor.shape)
        for (name, tensor), values in zip(found.items(), flat, strict=True)
    }
