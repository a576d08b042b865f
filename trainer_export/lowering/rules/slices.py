"""Lowerings of slices, selections and padding, and of their gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fleet_protocol.errors import ExportError
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.rules.axes import unsqueeze
from trainer_export.lowering.rules.joins import join
from trainer_export.lowering.values import Dim, Spec, Value, without

aten = torch.ops.aten

_END = 2**62  # torch writes an open end of a slice as the largest int64


@dataclass(frozen=True)
class _Range:
    """Positions along a dimension, in the form of slice operators."""

    dim: int = 0
    start: Any = None
    end: Any = None
    step: int = 1


def _slice(emit: Emitter, out: Spec, x: Value, *positions: Any) -> Value:
    chosen = _Range(*positions)
    if out.shape == x.shape and chosen.step == 1:
        return x
    x = emit.full(x)
    dim = chosen.dim % x.rank
    start = 0 if chosen.start is None else chosen.start
    bounds = [emit.size(start), emit.size(_stop(chosen.end, x.shape[dim]))]
    axis = emit.ints(x.order.index(dim))
    step = emit.ints(chosen.step)
    name = emit.node("Slice", x.name, *bounds, axis, step)
    return emit.value(name, out.shape, x.dtype, x.order)


def _stop(end: Any, size: Dim) -> Any:
    """Return the end of a slice; all forms of an open end give one constant."""
    if end is None or end == size:
        return _END
    return _END if isinstance(end, int) and end > _END else end


def _slice_backward(
    emit: Emitter,
    out: Spec,
    grad: Value,
    sizes: Sequence[Dim],
    *positions: Any,
) -> Value:
    # dx is dy where the slice read and 0 elsewhere: padding before and after, or, if the slice
    # skipped places, a look-up with a row of zeros for these.
    dim, start, _, step = positions  # the gradient's own size says where it ends
    grad = emit.full(grad)
    dim = dim % len(sizes)
    size = sizes[dim]
    if out.shape == grad.shape and step == 1:
        return grad
    if not isinstance(size, int):
        raise ExportError(
            "the gradient of a slice of the batch cannot be exported; use the whole batch"
        )
    kept = grad.shape[dim]
    if step == 1:
        start = max(start + size, 0) if start < 0 else min(start, size)
        return padded(emit, grad, dim, (start, size - start - kept))
    table = np.full(size, kept)
    table[slice(start, None, step)][:kept] = np.arange(kept)
    rows = padded(emit, grad, dim, (0, 1))
    axis = grad.order.index(dim)
    places = emit.constant(table)
    name = emit.node("Gather", rows.name, places, axis=axis)
    return emit.value(name, out.shape, grad.dtype, grad.order)


def _slice_scatter(emit: Emitter, out: Spec, x: Value, update: Value, *positions: Any) -> Value:
    # Both tensors joined, and a look-up with one constant table that takes each position from its
    # new source; joining pieces would need many nodes for a large step.
    chosen = _Range(*positions)
    dim = chosen.dim % x.rank
    size = x.shape[dim]
    if not isinstance(size, int):
        if update.shape[dim] == size:
            return update
        raise ExportError(
            "writing into a part of the batch cannot be exported; use torch.where with a mask"
        )
    places = np.arange(size)[slice(chosen.start, chosen.end, chosen.step)]
    if len(places) == size:
        return update
    table = np.arange(size)
    table[places] = size + np.arange(len(places))
    shape = (*out.shape[:dim], size + len(places), *out.shape[dim + 1 :])
    joined = join(emit, Spec(shape, out.dtype), [x, update], dim)
    axis = joined.order.index(dim)
    sources = emit.constant(table)
    name = emit.node("Gather", joined.name, sources, axis=axis)
    return emit.value(name, out.shape, out.dtype, joined.order)


def _select_scatter(emit: Emitter, out: Spec, x: Value, update: Value, *place: int) -> Value:
    dim = place[0] % x.rank
    index = place[1] % x.shape[dim]
    row = unsqueeze(emit, out, update, dim)
    return _slice_scatter(emit, out, x, row, dim, index, index + 1)


def padded(emit: Emitter, x: Value, dim: int, around: tuple[int, int], value: float = 0.0) -> Value:
    """Return the complete value, padded at both ends of a dimension.

    Args:
        emit: where it is written.
        x: the complete value.
        dim: the dimension.
        around: how many before and after.
        value: the padding value.
    """
    before, after = around
    if before == after == 0:
        return x
    dim %= x.rank
    axis = x.order.index(dim)
    pads = [0] * (2 * x.rank)
    pads[axis] = before
    pads[axis + x.rank] = after
    widths = emit.ints(*pads)
    filling = emit.scalar(value, x.dtype)
    name = emit.node("Pad", x.name, widths, filling.name)
    shape = (*x.shape[:dim], x.shape[dim] + before + after, *x.shape[dim + 1 :])
    return emit.value(name, shape, x.dtype, x.order)


def _constant_pad(
    emit: Emitter,
    _out: Spec,
    x: Value,
    pads: Sequence[int],
    value: float = 0.0,
) -> Value:
    x = emit.full(x)
    for i in range(0, len(pads), 2):
        dim = x.rank - 1 - i // 2  # torch counts pads from the last dimension
        before, after = pads[i : i + 2]
        if before < 0 or after < 0:
            x = _cut(
                emit,
                x,
                dim,
                max(-before, 0),
                max(-after, 0),
            )
        x = padded(
            emit,
            x,
            dim,
            (max(before, 0), max(after, 0)),
            value,
        )
    return x


def _cut(emit: Emitter, x: Value, dim: int, before: int, after: int) -> Value:
    """Return the complete value, trimmed at both ends of a dimension."""
    axis = emit.ints(x.order.index(dim))
    start = emit.ints(before)
    stop = emit.ints(-after if after else _END)
    name = emit.node("Slice", x.name, start, stop, axis)
    shape = (*x.shape[:dim], x.shape[dim] - before - after, *x.shape[dim + 1 :])
    return emit.value(name, shape, x.dtype, x.order)


def _select(emit: Emitter, out: Spec, x: Value, dim: int, index: int) -> Value:
    x = emit.full(x)
    dim = dim % x.rank
    axis = x.order.index(dim)
    place = emit.scalar(index, torch.int64)
    name = emit.node("Gather", x.name, place.name, axis=axis)
    kept = without(dim, x.rank)
    order = []
    for old_axis in x.order:
        if old_axis != dim:
            order.append(kept.index(old_axis))
    return emit.value(name, out.shape, x.dtype, order)


def _select_backward(
    emit: Emitter,
    out: Spec,
    grad: Value,
    sizes: Sequence[Dim],
    *place: int,
) -> Value:
    # dx is dy at the index and 0 elsewhere: padding.
    dim = place[0] % len(sizes)
    size = sizes[dim]
    if not isinstance(size, int):
        raise ExportError(
            "the gradient of a selection along the batch cannot be exported; use the whole batch"
        )
    row = unsqueeze(emit, out, grad, dim)
    lifted = emit.full(row)
    index = place[1] % size
    return padded(emit, lifted, dim, (index, size - index - 1))


def _unbind(emit: Emitter, out: Sequence[Spec], x: Value, dim: int = 0) -> tuple[Value, ...]:
    rows = []
    for i, spec in enumerate(out):
        rows.append(_select(emit, spec, x, dim, i))
    return tuple(rows)


LOWERINGS: dict[Any, Callable[..., Any]] = {
    aten.slice.Tensor: _slice,
    aten.slice_backward.default: _slice_backward,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.constant_pad_nd.default: _constant_pad,
    aten.select.int: _select,
    aten.select_backward.default: _select_backward,
    aten.unbind.int: _unbind,
}
