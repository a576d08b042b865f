"""Lowerings of views, and of axes that are inserted, removed, permuted or expanded.

Transposes and expansions stay pending (see `values`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.values import Dim, Spec, Value, overload, reorder

aten = torch.ops.aten


def _view(emit: Emitter, out: Spec, x: Value, *_: object) -> Value:
    return emit.view(x, out.shape)


def _with_axes(x: Value, axes: Sequence[int | None]) -> Value:
    """Return the value with only these logical axes, and new axes of size 1 for None.

    Its ONNX value is still that of ``x``: a Reshape is missing.
    """
    shape: list[Dim] = []
    stored: list[Dim] = []
    place: dict[int, int] = {}
    for i, axis in enumerate(axes):
        shape.append(1 if axis is None else x.shape[axis])
        stored.append(1 if axis is None else x.stored[axis])
        if axis is not None:
            place[axis] = i
    order = []
    for axis in x.order:
        if axis in place:
            order.append(place[axis])
    for i, axis in enumerate(axes):
        if axis is None:
            # After its left neighbour, so that a plain order stays plain.
            order.insert(order.index(i - 1) + 1 if i else 0, i)
    return Value(
        x.name,
        tuple(shape),
        x.dtype,
        tuple(stored),
        tuple(order),
    )


def _relabel(emit: Emitter, x: Value, axes: Sequence[int | None]) -> Value:
    """Return `_with_axes` with its Reshape."""
    result = _with_axes(x, axes)
    name = emit.reshaped(x.name, x.physical, result.physical)
    return replace(result, name=name)


def unsqueeze(emit: Emitter, _out: Spec, x: Value, dim: int) -> Value:
    """Return the value with a new axis of size 1 at a position."""
    axes: list[int | None] = list(range(x.rank))
    axes.insert(dim % (x.rank + 1), None)
    return _relabel(emit, x, axes)


def _squeeze(emit: Emitter, _out: Spec, x: Value, dim: Any = None) -> Value:
    dims = range(x.rank) if dim is None else dim
    if isinstance(dims, int):
        dims = [dims]
    if x.rank == 0:  # a scalar has no axis, although torch accepts one
        return _relabel(emit, x, [])
    kept = list(range(x.rank))
    for axis in dims:
        if x.shape[axis] == 1:
            kept.remove(axis % x.rank)
    return _relabel(emit, x, kept)


def permuted(x: Value, dims: Sequence[int]) -> Value:
    """Return the value with its axes in another order; costs nothing yet."""
    dims = [dim % x.rank for dim in dims]
    place = {axis: i for i, axis in enumerate(dims)}
    return Value(
        x.name,
        reorder(x.shape, dims),
        x.dtype,
        reorder(x.stored, dims),
        tuple(place[axis] for axis in x.order),
    )


def _transpose(_emit: Emitter, _out: Spec, x: Value, first: int, second: int) -> Value:
    if x.rank == 0:
        return x
    dims = list(range(x.rank))
    dims[first], dims[second] = dims[second], dims[first]
    return permuted(x, dims)


def _expand(emit: Emitter, out: Spec, x: Value, *_: object, **__: object) -> Value:
    missing = len(out.shape) - x.rank
    if missing:
        x = _relabel(
            emit,
            x,
            [None] * missing + list(range(x.rank)),
        )
    return replace(x, shape=out.shape)


LOWERINGS: dict[Any, Callable[..., Any]] = {
    aten.view.default: _view,
    overload("_unsafe_view"): _view,
    aten.reshape.default: _view,
    overload("_reshape_alias"): _view,
    aten.unsqueeze.default: unsqueeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.permute.default: lambda _emit, _out, x, dims: permuted(x, dims),
    aten.transpose.int: _transpose,
    aten.t.default: lambda _emit, _out, x: x if x.rank < 2 else permuted(x, (1, 0)),
    aten.expand.default: _expand,
    aten.copy.default: lambda emit, out, _x, source, *_: _expand(
        emit,
        out,
        emit.cast(source, out.dtype),
    ),
}
