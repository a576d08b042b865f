"""Lowerings of look-ups by constant places: reversed, rolled and repeated tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fleet_protocol.errors import ExportError
from trainer_export import operators  # noqa: F401 - registers shoal::take
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.rules.slices import padded
from trainer_export.lowering.values import Dim, Spec, Value

aten = torch.ops.aten


def _look_up(emit: Emitter, _out: Spec, x: Value, dim: int, index: Sequence[int]) -> Value:
    """Return elements along a dimension by constant places, zeros for -1."""
    x = emit.full(x)
    size = x.shape[dim]
    shape = (*x.shape[:dim], len(index), *x.shape[dim + 1 :])
    # One zero is appended, and every place of -1 reads it: without it, a Gather would read the last
    # element.
    if -1 in index:
        x = padded(emit, x, dim, (0, 1))
    places = []
    for place in index:
        places.append(size if place < 0 else place)
    # Along the dimension as it lies in memory, so that a permuted tensor need not be copied first.
    axis = x.order.index(dim)
    table = emit.constant(np.array(places, np.int64))
    name = emit.node("Gather", x.name, table, axis=axis)
    return emit.value(name, shape, x.dtype, x.order)


def _flip(emit: Emitter, out: Spec, x: Value, dims: Sequence[int]) -> Value:
    for dim in dims:
        axis = dim % x.rank
        size = fixed_size(x.shape[axis], "flip")
        x = _look_up(emit, out, x, axis, range(size)[::-1])
    return x


def _roll(
    emit: Emitter,
    out: Spec,
    x: Value,
    shifts: Sequence[int],
    dims: Sequence[int] = (),
) -> Value:
    if not dims:
        raise ExportError("roll without dims cannot be exported; pass the dimension")
    for shift, dim in zip(shifts, dims, strict=True):
        axis = dim % x.rank
        size = fixed_size(x.shape[axis], "roll")
        sources = []
        for place in range(size):
            sources.append((place - shift) % size)
        x = _look_up(emit, out, x, axis, sources)
    return x


def fixed_size(size: Dim, name: str) -> int:
    """Return a size that does not depend on the batch, which the operator needs."""
    if not isinstance(size, int):
        raise ExportError(f"{name} along the batch cannot be exported; use another dimension")
    return size


def _tile(emit: Emitter, out: Spec, x: Value, repeats: Sequence[int]) -> Value:
    # PyTorch repeats over new leading dimensions, too; ONNX's Tile wants a count for each that is
    # there.
    shape = (1,) * (len(repeats) - x.rank) + tuple(x.shape)
    lifted = emit.view(x, shape)
    source = emit.in_logical_order(lifted)
    counts = emit.shape_tensor(tuple(repeats))
    name = emit.node("Tile", source, counts)
    return emit.value(name, out.shape, x.dtype)


LOWERINGS: dict[Any, Callable[..., Any]] = {
    torch.ops.shoal.take.default: _look_up,
    aten.flip.default: _flip,
    aten.roll.default: _roll,
    aten.repeat.default: _tile,
}
