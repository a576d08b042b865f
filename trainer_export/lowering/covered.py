"""The part of a feature map that adjacent windows cover: whole windows from its first element."""

import math
from dataclasses import dataclass

import numpy as np

from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.values import Spec, Value, channels_last, planes, reorder


@dataclass(frozen=True)
class Covered:
    """The part of a feature map that windows cover.

    Attributes:
        name: the ONNX value.
        order: its physical axis order.
        sizes: its spatial sizes.
    """

    name: str
    order: tuple[int, ...]
    sizes: tuple[int, ...]


def crop(emit: Emitter, x: Value, kernel: tuple[int, ...]) -> Covered:
    """Return the part of a feature map that windows cover, channels-last."""
    order = channels_last(x.rank)
    name = emit.arranged(x, order)
    sizes = tuple(size // k * k for size, k in zip(x.shape[2:], kernel, strict=True))
    if sizes == x.shape[2:]:
        return Covered(name, order, sizes)
    # One look-up of rows of channels, where a slice per axis would copy twice.
    positions = math.prod(x.shape[2:])
    table = np.arange(positions, dtype=np.int64).reshape(x.shape[2:])
    kept = table[tuple(slice(size) for size in sizes)]
    row_sizes = emit.ints(-1, positions, x.shape[1])
    rows = emit.node("Reshape", name, row_sizes)
    index = emit.constant(np.ascontiguousarray(kept).reshape(-1))
    cropped = emit.node("Gather", rows, index, axis=1)
    return Covered(cropped, order, sizes)


def cover(emit: Emitter, x: Value, kernel: tuple[int, ...]) -> Covered:
    """Return the covered part, in planes if the map is in planes and fully covered."""
    order = planes(x.rank)
    whole = not any(size % k for size, k in zip(x.shape[2:], kernel, strict=True))
    if x.lies(order) and whole:
        in_planes = emit.arranged(x, order)
        return Covered(in_planes, order, x.shape[2:])
    return crop(emit, x, kernel)


def uncrop(emit: Emitter, covered: Covered, out: Spec) -> Value:
    """Return the covered part as a feature map, with zeros outside it."""
    order = covered.order
    logical = (-1, out.shape[1], *covered.sizes)
    sizes = emit.ints(*reorder(logical, order))
    name = emit.node("Reshape", covered.name, sizes)
    uncovered = []
    for full, size in zip(out.shape[2:], covered.sizes, strict=True):
        uncovered.append(full - size)
    missing = (0, 0, *uncovered)
    if any(missing):
        pads = emit.ints(*[0] * len(order), *reorder(missing, order))
        name = emit.node("Pad", name, pads)
    return emit.value(name, out.shape, order=order)
