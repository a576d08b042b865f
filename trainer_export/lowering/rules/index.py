"""Lowerings of look-ups by tensors of places, and of writes at such places."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fleet_protocol.errors import ExportError
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.rules.axes import permuted
from trainer_export.lowering.values import Dim, Spec, Value, overload, reorder

aten = torch.ops.aten

# Beyond any tensor, and far enough from 2^63 that a sum with other offsets does not wrap around.
_BEYOND = 2**62  # a place that every look-up refuses


@dataclass(frozen=True)
class _Indexed:
    """A tensor that tensors index in some of its dimensions.

    Attributes:
        dims: dimensions with an index.
        other_dims: dimensions without an index.
        indices: one for each of `dims`.
    """

    x: Value
    dims: list[int]
    other_dims: list[int]
    indices: list[Value]

    @property
    def sizes(self) -> tuple[Dim, ...]:
        """Sizes of the indexed dimensions."""
        return reorder(self.x.shape, self.dims)

    @property
    def other_sizes(self) -> tuple[Dim, ...]:
        """Sizes of the other dimensions."""
        return reorder(self.x.shape, self.other_dims)

    @property
    def rows(self) -> Value:
        """The tensor with its indexed dimensions first."""
        return permuted(self.x, [*self.dims, *self.other_dims])

    @property
    def position(self) -> int:
        """The position of the index dimensions in the result, as in NumPy.

        They replace the first indexed dimension if the indexed dimensions are neighbours; otherwise
        they come first.
        """
        first = self.dims[0]
        neighbours = list(range(first, self.dims[-1] + 1))
        return first if self.dims == neighbours else 0


def _indexed(x: Value, indices: Sequence[Value | None]) -> _Indexed:
    dims = []
    present = []
    for dim, index in enumerate(indices):
        if index is not None:
            dims.append(dim)
            present.append(index)
    other_dims = []
    for dim in range(x.rank):
        if dim not in dims:
            other_dims.append(dim)
    return _Indexed(x, dims, other_dims, present)


def _places(emit: Emitter, indexed: _Indexed) -> Value:
    """Return flat places in the indexed dimensions: the sum of index times stride.

    An index out of bounds gives a place outside the tensor, which a look-up refuses; otherwise it
    would read a neighbouring row.
    """
    sizes = indexed.sizes
    flat: Value | None = None
    beyond: list[Value] = []
    for number, (size, index) in enumerate(zip(sizes, indexed.indices, strict=True)):
        if index.dtype == torch.bool:
            raise ExportError(
                "indexing by a mask cannot be exported, because sizes must not depend on values;"
                " multiply by the mask, or use torch.where(mask, new, old)"
            )
        place = emit.cast(index, torch.int64)
        if isinstance(size, int):
            place = _from_start(emit, place, size)
            beyond += _out_of_bounds(emit, place, size)
        stride = math.prod(sizes[number + 1 :])
        if not isinstance(stride, int):
            raise ExportError(
                "an index in front of the batch dimension cannot be exported; move the batch first"
            )
        step = emit.scalar(stride, torch.int64)
        offset = emit.mul(place, step)
        # Row-major, as the view below lays the indexed dimensions side by side.
        flat = offset if flat is None else emit.add(flat, offset)
    assert flat is not None
    # Last of all, so that no later offset brings a refused place back into the tensor.
    for refused in beyond:
        nowhere = emit.scalar(_BEYOND, torch.int64)
        flat = emit.pointwise("Where", refused, nowhere, flat, dtype=torch.int64)
    return flat


def _from_start(emit: Emitter, place: Value, size: int) -> Value:
    """Return places from the start; negative places count from the end."""
    zero = emit.scalar(0, torch.int64)
    low = emit.pointwise("Less", place, zero, dtype=torch.bool)
    end = emit.scalar(size, torch.int64)
    from_end = emit.add(place, end)
    return emit.pointwise("Where", low, from_end, place, dtype=torch.int64)


def _out_of_bounds(emit: Emitter, place: Value, size: int) -> list[Value]:
    """Return masks of places before and after a dimension."""
    zero = emit.scalar(0, torch.int64)
    before = emit.pointwise("Less", place, zero, dtype=torch.bool)
    end = emit.scalar(size, torch.int64)
    behind = emit.pointwise("GreaterOrEqual", place, end, dtype=torch.bool)
    return [before, behind]


def _index(emit: Emitter, _out: Spec, x: Value, indices: Sequence[Value | None]) -> Value:
    # Several indices are one look-up of rows by flat places.
    indexed = _indexed(x, indices)
    flat = _places(emit, indexed)
    other_sizes = indexed.other_sizes
    matrix = emit.view(indexed.rows, (math.prod(indexed.sizes), *other_sizes))
    rows_by_place = emit.in_logical_order(matrix)
    places = emit.in_logical_order(flat)
    name = emit.node("Gather", rows_by_place, places, axis=0)
    rows = emit.value(name, (*flat.shape, *other_sizes), x.dtype)
    # Gather puts the dimensions of the index in front; PyTorch where the first indexed one stood.
    return _move_index_dims(rows, flat.rank, 0, indexed.position)


def _move_index_dims(x: Value, count: int, source: int, target: int) -> Value:
    """Return the value with ``count`` neighbouring dimensions moved to another position."""
    moved = list(range(source, source + count))
    dims = []
    for dim in range(x.rank):
        if dim not in moved:
            dims.append(dim)
    dims[target:target] = moved
    return permuted(x, dims)


def _index_put(
    emit: Emitter,
    out: Spec,
    x: Value,
    indices: Sequence[Value | None],
    values: Value,
    accumulate: bool = False,
) -> Value:
    """Write, or add, values at flat places of the rows of a tensor.

    This is serial, like the gradient of an embedding in `look_up`, because the runtime's parallel
    scatter loses sums of repeated places. A single number at the places of a mask is a choice.
    """
    if len(indices) == 1 and not values.rank and not accumulate:
        mask = indices[0]
        if mask is not None and mask.dtype == torch.bool:
            over = emit.view(mask, (*mask.shape, *(1,) * (x.rank - mask.rank)))
            return emit.pointwise("Where", over, values, x, dtype=out.dtype)
    indexed = _indexed(x, indices)
    flat = _places(emit, indexed)
    updates = _values_by_place(emit, values, indexed, flat)
    height = math.prod(indexed.sizes)
    width = math.prod(indexed.other_sizes)
    count = math.prod(flat.shape)
    matrix_of_rows = emit.view(indexed.rows, (height, width))
    target = emit.in_logical_order(matrix_of_rows)
    matrix_of_updates = emit.view(updates, (count, width))
    source = emit.in_logical_order(matrix_of_updates)
    # ScatterElements wants a place for each number, ScatterND would take one for each row.
    matrix_of_places = emit.view(flat, (count, 1))
    column = emit.in_logical_order(matrix_of_places)
    width_sizes = emit.shape_tensor((1, width))
    places = emit.node("Expand", column, width_sizes)
    reduction = "add" if accumulate else "none"
    name = emit.node("ScatterElements", target, places, source, axis=0, reduction=reduction)
    matrix = emit.value(name, (height, width), x.dtype)
    back = emit.view(matrix, (*indexed.sizes, *indexed.other_sizes))
    # The inverse of the permutation that brought the indexed dimensions to the front.
    dims = [*indexed.dims, *indexed.other_dims]
    return permuted(back, [dims.index(dim) for dim in range(x.rank)])


def _values_by_place(emit: Emitter, values: Value, indexed: _Indexed, flat: Value) -> Value:
    """Return values broadcast to what an index reads, with the dimensions of the index in front."""
    position = indexed.position
    sizes = indexed.other_sizes
    whole = (*sizes[:position], *flat.shape, *sizes[position:])
    lifted = emit.view(values, (1,) * (len(whole) - values.rank) + tuple(values.shape))
    spread = Value(lifted.name, whole, lifted.dtype, lifted.stored, lifted.order)
    return _move_index_dims(spread, flat.rank, position, 0)


def _scatter(reduction: str) -> Callable[..., Value]:
    def lower(emit: Emitter, out: Spec, x: Value, dim: int, index: Value, source: Any) -> Value:
        value = source if isinstance(source, Value) else emit.scalar(source, x.dtype)
        updates = Value(value.name, index.shape, value.dtype, value.stored, value.order)
        if value.rank != index.rank:
            target_sizes = emit.shape_tensor(index.shape)
            name = emit.node("Expand", value.name, target_sizes)
            updates = emit.value(name, index.shape, x.dtype)
        # PyTorch reads the part of the sources that has the shape of the index; ONNX wants equal
        # shapes.
        elif value.shape != index.shape:
            raise ExportError(
                "scatter with more sources than places cannot be exported; slice the sources first"
            )
        inputs = [
            emit.in_logical_order(x),
            emit.in_logical_order(index),
            emit.in_logical_order(updates),
        ]
        axis = dim % x.rank
        name = emit.node("ScatterElements", *inputs, axis=axis, reduction=reduction)
        return emit.value(name, out.shape, x.dtype)

    return lower


LOWERINGS: dict[Any, Callable[..., Any]] = {
    aten.index.Tensor: _index,
    aten._unsafe_index.Tensor: _index,  # noqa: SLF001 - its name
    aten.index_put.default: _index_put,
    overload("_unsafe_index_put"): _index_put,
    aten.scatter.src: _scatter("none"),
    aten.scatter.value: _scatter("none"),
    aten.scatter_add.default: _scatter("add"),
}
