"""Encodings of updates and weights: what a device learnt, and what it begins with, in fewer bits than float32 has.

An update of ``fp32`` is the new weights. Any other is their difference to the weights that were sent, all tensors one
after the other in the order of the manifest:

- ``fp16``: ``values``, float16.
- ``int8``: ``values``, int8, and ``scales``, one float32 for every 128 values of a tensor; a tensor's last block may be
  shorter. An entry is its value times its block's scale, which is the block's largest entry over 127.
- ``int4``: the same from -7 to 7, of two values a byte, the first in the low half.

Weights on their way to devices are tensors of the encoded type under their own names, with the ``scales`` of all behind
them; whoever opens them has float32 again.

Values are rounded to the nearest, or at random, up or down with the probability that keeps their expectation (QSGD:
Alistarh, Grubic, Li, Tomioka and Vojnovic, NeurIPS 2017, https://arxiv.org/abs/1610.02132).
"""

import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.digests import blob_digest
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.mapped_tensors import open_tensors

LEVELS = {"int8": 127, "int4": 7}
"""Of the encodings that are rounded so much that what was lost matters: the largest value."""

ENCODINGS = ("fp32", "fp16", *LEVELS)

_SENT = {"float16": "fp16", "int8": "int8"}  # encodings of weights, by what their tensors are
_SCALES = "/scales"  # no name of a parameter
_BLOCK = 128

Tensors = dict[str, NDArray[np.float32]]


def _blocks(size: int) -> int:
    return -(-size // _BLOCK)


def encode(
    difference: Mapping[str, NDArray[np.float32]], encoding: str, *, at_random: bool = False
) -> dict[str, NDArray[Any]]:
    """Write a difference, by name in the order of the manifest, as vectors in one of `ENCODINGS` but ``fp32``.

    At random (`LEVELS` alone) it is rounded by numbers that follow from the digest of the difference: the same wherever
    it is encoded, and others on every device.

    Raises:
        RefusedError: an entry is not finite, or too large for float16.
    """
    if encoding not in LEVELS:
        with np.errstate(over="ignore"):
            halves = {name: tensor.reshape(-1).astype(np.float16) for name, tensor in difference.items()}
        for name, half in halves.items():
            _require_finite(half, name, encoding)
        return {"values": np.concatenate([np.zeros(0, np.float16), *halves.values()])}
    top, draw = LEVELS[encoding], None
    if at_random:
        digest = blob_digest(*(tensor.tobytes() for tensor in difference.values()))
        draw = np.random.Generator(np.random.PCG64(np.random.SeedSequence(int(digest[-32:], 16))))
    values, scales = [np.zeros(0, np.int8)], [np.zeros(0, np.float32)]
    for name, tensor in difference.items():
        blocks = np.zeros((_blocks(tensor.size), _BLOCK), np.float32)
        blocks.reshape(-1)[: tensor.size] = tensor.reshape(-1)
        scales.append(np.abs(blocks).max(axis=1) / np.float32(top))
        _require_finite(scales[-1], name, encoding)
        blocks /= np.where(scales[-1] > 0, scales[-1], 1)[:, None]
        rounded = np.rint(blocks) if draw is None else np.floor(blocks + draw.random(blocks.shape, np.float32))
        values.append(np.clip(rounded, -top, top).reshape(-1)[: tensor.size].astype(np.int8))
    whole = np.concatenate(values)
    if encoding == "int4":
        nibbles = np.append(whole, np.zeros(whole.size % 2, np.int8)) & 15
        whole = nibbles[::2] | nibbles[1::2] << 4
    return {"values": whole, "scales": np.concatenate(scales)}


def _require_finite(found: NDArray[Any], name: str, encoding: str) -> None:
    if not np.isfinite(found).all():
        raise RefusedError(
            RefusalReason.NOT_FINITE,
            f"what is to be sent of tensor {name} is not finite, or too large for {encoding}; train with a smaller"
            ' learning rate, or take encoding = "fp32" in [upload] or [download]',
        )


def decode(parts: Mapping[str, NDArray[Any]], shapes: Mapping[str, tuple[int, ...]], encoding: str) -> Tensors:
    """Read what `encode` wrote; the shapes, in the order of the manifest, alone decide how much memory is taken.

    Raises:
        RefusedError: a part is missing, foreign, or of another type or length, or a scale is negative or not finite.
    """
    sizes = [math.prod(shape) for shape in shapes.values()]
    count = sum(sizes)
    expected: dict[str, tuple[str, int]] = {"values": ("float16", count)}
    if encoding in LEVELS:
        expected = {
            "values": ("int8", count if encoding == "int8" else -(-count // 2)),
            "scales": ("float32", sum(map(_blocks, sizes))),
        }
    found = {name: (part.dtype.name, part.size) for name, part in parts.items() if part.ndim == 1}
    if found != expected or len(parts) != len(found):
        raise RefusedError(RefusalReason.BAD_SHAPE, f"what is in {encoding} has {expected}, this {found}")
    values = parts["values"]
    if encoding == "int4":
        values = ((np.stack([values & 15, values >> 4 & 15], axis=1).reshape(-1)[:count]) ^ 8) - 8
    scales = parts.get("scales", np.zeros(0, np.float32))
    if not (np.isfinite(scales) & (scales >= 0)).all():
        raise RefusedError(RefusalReason.NOT_FINITE, f"what is in {encoding} has a scale that is negative or no number")
    ends, marks = (np.cumsum([0, *items]).tolist() for items in (sizes, map(_blocks, sizes)))
    result = {}
    for (name, shape), (start, stop), (first, last) in zip(
        shapes.items(), pairwise(ends), pairwise(marks), strict=True
    ):
        tensor = values[start:stop].astype(np.float32)
        if encoding in LEVELS:
            with np.errstate(over="ignore"):  # what is not finite then is found where the whole update is checked
                tensor *= np.repeat(scales[first:last], _BLOCK)[: stop - start]
        result[name] = tensor.reshape(shape)
    return result


def encode_whole(weights: Mapping[str, NDArray[np.float32]], encoding: str) -> dict[str, NDArray[Any]]:
    """Write weights as devices are sent them, in ``fp32``, ``fp16`` or ``int8``; `open_weights` reads them.

    Raises:
        RefusedError: an entry is not finite, or too large for float16.
    """
    if encoding == "fp32":
        return dict(weights)
    parts = encode(weights, encoding)
    ends = np.cumsum([tensor.size for tensor in weights.values()])[:-1]
    named = zip(weights.items(), np.split(parts["values"], ends), strict=True)
    whole = {name: values.reshape(tensor.shape) for (name, tensor), values in named}
    return whole | ({_SCALES: parts["scales"]} if "scales" in parts else {})


def open_weights(path: Path) -> Mapping[str, NDArray[Any]]:
    """Weights as a device was sent them, by name: views of a mapped file, or where they are encoded float32 of its own.

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
    shapes = {name: tensor.shape for name, tensor in found.items()}
    return decode(parts if scales is None else parts | {"scales": scales}, shapes, encoding)
