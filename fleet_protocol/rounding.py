"""Rounds float32 tensors to 16 bits, or to a few levels with a scale for each block.

Levels are rounded to the nearest, or at random, up or down with the probability that keeps their
expectation (QSGD: Alistarh, Grubic, Li, Tomioka and Vojnovic, NeurIPS 2017,
https://arxiv.org/abs/1610.02132).
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.digests import blob_digest
from fleet_protocol.errors import RefusalReason, RefusedError

Floats = NDArray[np.float32]
Vector = NDArray[Any]

LEVELS = {"int8": 127, "int4": 7, "topk": 127}
"""The largest level of each encoding with a considerable loss."""

HALVES = {"fp16": "float16", "bf16": "uint16"}
"""Types of the encodings of 16 bits."""

_BLOCK = 128  # values with one scale
_NIBBLE = 15
_SIGN_OF_NIBBLE = 8


def count_blocks(size: int) -> int:
    """Return the number of blocks of a tensor; the last may be shorter."""
    return -(-size // _BLOCK)


def to_half(tensor: Floats, encoding: str) -> Vector:
    """Round a tensor to 16 bits, to the nearest value, or the even one of two."""
    if encoding == "fp16":
        with np.errstate(over="ignore"):
            return tensor.astype(np.float16)
    bits = tensor.view(np.uint32)
    lowest_kept = bits >> 16 & 1
    return ((bits + (lowest_kept + 0x7FFF)) >> 16).astype(np.uint16)


def widen(values: Vector) -> Floats:
    """Return values of an encoding as float32."""
    if values.dtype == np.uint16:  # the upper half of float32
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def round_to_levels(
    flat: Mapping[str, Floats], encoding: str, *, at_random: bool
) -> dict[str, Vector]:
    """Round flat tensors to levels.

    Args:
        flat: tensors ``[N]`` by name.
        encoding: one of `LEVELS`.
        at_random: whether to round at random; the random numbers follow from the digest of the
            tensors.

    Returns:
        ``values`` of all tensors, and ``scales`` of their blocks.

    Raises:
        RefusedError: a value is not finite.
    """
    top = LEVELS[encoding]
    generator = _generator_of(flat.values()) if at_random else None
    values = [np.zeros(0, np.int8)]
    scales = [np.zeros(0, np.float32)]
    for name, tensor in flat.items():
        blocks = np.zeros((count_blocks(tensor.size), _BLOCK), np.float32)
        blocks.reshape(-1)[: tensor.size] = tensor
        scale = np.abs(blocks).max(axis=1) / np.float32(top)
        require_finite(scale, name, encoding)
        # A block of zeros has the scale 0.
        blocks /= np.where(scale > 0, scale, 1)[:, None]
        if generator is None:
            rounded = np.rint(blocks)
        else:
            # A value rounds up with the probability of its fraction.
            rounded = np.floor(blocks + generator.random(blocks.shape, np.float32))
        levels = np.clip(rounded, -top, top).reshape(-1)[: tensor.size]
        values.append(levels.astype(np.int8))
        scales.append(scale)
    joined = np.concatenate(values)
    if encoding == "int4":
        joined = _pack_nibbles(joined)
    return {"values": joined, "scales": np.concatenate(scales)}


def restore(
    parts: Mapping[str, Vector],
    sizes: Sequence[int],
    encoding: str,
) -> list[Floats]:
    """Return flat tensors of given sizes from their values and scales.

    Raises:
        RefusedError: a part is missing, unknown, or of another type or length, or a scale is
            negative or not finite.
    """
    count = sum(sizes)
    _check_parts(parts, _expected_parts(parts, sizes, encoding), encoding)
    # Checked before: values have the length that the sizes need.
    values = parts["values"]
    if encoding == "int4":
        values = _unpack_nibbles(values, count)
    scales = parts.get("scales", np.zeros(0, np.float32))
    if not (np.isfinite(scales) & (scales >= 0)).all():
        raise RefusedError(
            RefusalReason.NOT_FINITE,
            f"the data in {encoding} has a scale that is negative or not a number",
        )
    ends = _running_total(sizes)
    block_ends = _running_total(map(count_blocks, sizes))
    tensors = []
    extents = zip(pairwise(ends), pairwise(block_ends), strict=True)
    for (start, stop), (first_block, last_block) in extents:
        tensor = widen(values[start:stop])
        if encoding in LEVELS:
            # Values that are then not finite are refused where the whole update is checked.
            with np.errstate(over="ignore"):
                tensor *= np.repeat(scales[first_block:last_block], _BLOCK)[: stop - start]
        tensors.append(tensor)
    return tensors


def require_finite(
    values: Vector,
    name: str,
    encoding: str,
) -> None:
    """Check that values of a tensor are finite.

    Raises:
        RefusedError: they are not, or were too large for the encoding.
    """
    if not np.isfinite(values).all():
        raise RefusedError(
            RefusalReason.NOT_FINITE,
            f"the values of tensor {name} are not finite, or too large for {encoding}; train "
            'with a smaller learning rate, or set encoding = "fp32" in [upload] or '
            "[download]",
        )


def _generator_of(tensors: Iterable[Floats]) -> np.random.Generator:
    """Return the generator that follows from tensors: the same wherever they are encoded."""
    digest = blob_digest(*(tensor.tobytes() for tensor in tensors))
    seed = np.random.SeedSequence(int(digest[-32:], 16))
    return np.random.Generator(np.random.PCG64(seed))


def _pack_nibbles(levels: NDArray[np.int8]) -> Vector:
    """Put two levels into a byte, the first into the low half."""
    padding = np.zeros(levels.size % 2, np.int8)
    nibbles = np.append(levels, padding) & _NIBBLE
    packed: Vector = nibbles[::2] | nibbles[1::2] << 4
    return packed


def _unpack_nibbles(packed: Vector, count: int) -> Vector:
    """Return the levels of `_pack_nibbles`, of which there are `count`."""
    nibbles = np.stack([packed & _NIBBLE, packed >> 4 & _NIBBLE], axis=1).reshape(-1)[:count]
    levels: Vector = (nibbles ^ _SIGN_OF_NIBBLE) - _SIGN_OF_NIBBLE
    return levels


def _expected_parts(
    parts: Mapping[str, Vector], sizes: Sequence[int], encoding: str
) -> dict[str, tuple[str, int]]:
    """Return type and length of every part that tensors of some sizes have."""
    count = sum(sizes)
    dtype = HALVES.get(encoding, "int8")
    expected = {"values": (dtype, -(-count // 2) if encoding == "int4" else count)}
    if encoding in LEVELS:
        expected["scales"] = ("float32", sum(map(count_blocks, sizes)))
    if encoding == "topk":
        # Their number depends on the positions, which are checked when they are read.
        gap_count = parts["gaps"].size if "gaps" in parts else count
        expected["gaps"] = ("uint8", gap_count)
    return expected


def _check_parts(
    parts: Mapping[str, Vector], expected: Mapping[str, tuple[str, int]], encoding: str
) -> None:
    vectors = {}
    for name, vector in parts.items():
        if vector.ndim == 1:
            vectors[name] = (vector.dtype.name, vector.size)
    if vectors != expected or len(parts) != len(vectors):
        raise RefusedError(
            RefusalReason.BAD_SHAPE,
            f"the data in {encoding} should have {expected}, but this has {vectors}",
        )


def _running_total(counts: Iterable[int]) -> list[int]:
    totals: list[int] = np.cumsum([0, *counts]).tolist()
    return totals
