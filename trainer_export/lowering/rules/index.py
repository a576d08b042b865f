"""Lowerings of look-ups by tensors, of places known beforehand, and of their gradients."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fleet_protocol.errors import ExportError
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.rules.shape import padded, permuted
from trainer_export.lowering.values import Dim, Spec, Value, overload

aten = torch.ops.aten


def _take(e: Emitter, _out: Spec, x: Value, dim: int, index: Sequence[int]) -> Value:
    """Elements along a dimension by constant places, zeros for -1."""
    x = e.full(x)
    size = x.shape[dim]
    shape = (*x.shape[:dim], len(index), *x.shape[dim + 1 :])
    if -1 in index:
        x = padded(e, x, dim, (0, 1))
    places = np.array([size if place < 0 else place for place in index], np.int64)
    name = e.graph.node("Gather", x.name, e.graph.constant(places), axis=x.order.index(dim))
    return e.value(name, shape, x.dtype, x.order)


def _flip(e: Emitter, out: Spec, x: Value, dims: Sequence[int]) -> Value:
    for dim in dims:
        x = _take(e, out, x, dim % x.rank, range(_known(x.shape[dim % x.rank], "flip"))[::-1])
    return x


def _roll(
    e: Emitter, out: Spec, x: Value, shifts: Sequence[int], dims: Sequence[int] = ()
) -> Value:
    if not dims:
        raise ExportError("roll without dims cannot be exported; name the dimension")
    for shift, dim in zip(shifts, dims, strict=True):
        size = _known(x.shape[dim % x.rank], "roll")
        x = _take(e, out, x, dim % x.rank, [(place - shift) % size for place in range(size)])
    return x


def _known(size: Dim, name: str) -> int:
    if not isinstance(size, int):
        raise ExportError(f"{name} along the batch cannot be exported; name another dimension")
    return size


def _tile(e: Emitter, out: Spec, x: Value, repeats: Sequence[int]) -> Value:
    shape = (1,) * (len(repeats) - x.rank) + tuple(x.shape)
    name = e.graph.node("Tile", e.plain(e.view(x, shape)), e.shape_tensor(tuple(repeats)))
    return e.value(name, out.shape, x.dtype)


_BEYOND = 2**62


def _places(e: Emitter, sizes: Sequence[Dim], indices: Sequence[Value]) -> Value:
    """Flat places in dimensions of some sizes, from an index for each.

    Of one beyond its size, a place beyond all.
    """
    flat: Value | None = None
    beyond: list[Value] = []
    for number, (size, index) in enumerate(zip(sizes, indices, strict=True)):
        if index.dtype == torch.bool:
            raise ExportError(
                "indexing by a mask cannot be exported: sizes must not depend on values; multiply by it, or write"
                " torch.where(mask, new, old)"
            )
        place = e.cast(index, torch.int64)
        if isinstance(size, int):
            low = e.pointwise("Less", place, e.scalar(0, torch.int64), dtype=torch.bool)
            from_end = e.pointwise("Add", place, e.scalar(size, torch.int64))
            place = e.pointwise("Where", low, from_end, place, dtype=torch.int64)
            beyond.append(e.pointwise("Less", place, e.scalar(0, torch.int64), dtype=torch.bool))
            beyond.append(
                e.pointwise(
                    "GreaterOrEqual",
                    place,
                    e.scalar(size, torch.int64),
                    dtype=torch.bool,
                )
            )
        stride = math.prod(sizes[number + 1 :])
        if not isinstance(stride, int):
            raise ExportError(
                "an index before one of the batch cannot be exported; put the batch first"
            )
        part = e.pointwise("Mul", place, e.scalar(stride, torch.int64))
        flat = part if flat is None else e.pointwise("Add", flat, part)
    assert flat is not None
    for wrong in beyond:  # which the look-up refuses, where its neighbour's rows would be taken
        flat = e.pointwise("Where", wrong, e.scalar(_BEYOND, torch.int64), flat, dtype=torch.int64)
    return flat


def _indexed(x: Value, indices: Sequence[Value | None]) -> tuple[list[int], list[int], bool]:
    """Dimensions with an index, those without, and whether the first are neighbours."""
    chosen = [dim for dim, index in enumerate(indices) if index is not None]
    rest = [dim for dim in range(x.rank) if dim not in chosen]
    return chosen, rest, chosen == list(range(chosen[0], chosen[-1] + 1))


def _index(e: Emitter, _out: Spec, x: Value, indices: Sequence[Value | None]) -> Value:
    chosen, rest, together = _indexed(x, indices)
    flat = _places(e, [x.shape[d] for d in chosen], [i for i in indices if i is not None])
    kept = tuple(x.shape[d] for d in rest)
    rows = e.plain(
        e.view(
            permuted(x, [*chosen, *rest]),
            (math.prod(x.shape[d] for d in chosen), *kept),
        )
    )
    found = e.value(
        e.graph.node("Gather", rows, e.plain(flat), axis=0),
        (*flat.shape, *kept),
        x.dtype,
    )
    if not together:
        return found
    # The new dimensions stand where the first indexed one stood.
    before = chosen[0]
    many = flat.rank
    return permuted(
        found,
        [*range(many, many + before), *range(many), *range(many + before, found.rank)],
    )


def _index_put(
    e: Emitter,
    out: Spec,
    x: Value,
    indices: Sequence[Value | None],
    values: Value,
    accumulate: bool = False,
) -> Value:
    """Serial, as the look-up's gradient in `shape`: the runtime's parallel scatter loses sums of
    repeated places.

    One number where a mask is true is a choice.
    """
    mask = indices[0]
    if (
        len(indices) == 1
        and mask is not None
        and mask.dtype == torch.bool
        and not values.rank
        and not accumulate
    ):
        over = e.view(mask, (*mask.shape, *(1,) * (x.rank - mask.rank)))
        return e.pointwise("Where", over, values, x, dtype=out.dtype)
    chosen, rest, together = _indexed(x, indices)
    sizes = [x.shape[d] for d in chosen]
    flat = _places(e, sizes, [i for i in indices if i is not None])
    kept = tuple(x.shape[d] for d in rest)
    before = chosen[0] if together else 0
    whole = (*kept[:before], *flat.shape, *kept[before:])
    lifted = e.view(values, (1,) * (len(whole) - values.rank) + tuple(values.shape))
    spread = Value(lifted.name, whole, lifted.dtype, lifted.stored, lifted.order)
    many = flat.rank
    front = permuted(
        spread,
        [
            *range(before, before + many),
            *range(before),
            *range(before + many, len(whole)),
        ],
    )
    rows = math.prod(sizes)
    width = math.prod(kept)
    count = math.prod(flat.shape)
    target = e.plain(e.view(permuted(x, [*chosen, *rest]), (rows, width)))
    updates = e.plain(e.view(front, (count, width)))
    wide = e.graph.node("Expand", e.plain(e.view(flat, (count, 1))), e.shape_tensor((1, width)))
    reduction = "add" if accumulate else "none"
    name = e.graph.node("ScatterElements", target, wide, updates, axis=0, reduction=reduction)
    back = e.view(e.value(name, (rows, width), x.dtype), (*sizes, *kept))
    dims = [*chosen, *rest]
    return permuted(back, [dims.index(d) for d in range(x.rank)])


def _scatter(reduction: str) -> Callable[..., Value]:
    def lower(e: Emitter, out: Spec, x: Value, dim: int, index: Value, source: Any) -> Value:
        given = source if isinstance(source, Value) else e.scalar(source, x.dtype)
        updates = Value(given.name, index.shape, given.dtype, given.stored, given.order)
        if given.rank != index.rank:
            updates = e.value(
                e.graph.node("Expand", given.name, e.shape_tensor(index.shape)),
                index.shape,
                x.dtype,
            )
        elif given.shape != index.shape:
            raise ExportError(
                "scatter with more sources than places cannot be exported; cut the sources first"
            )
        name = e.graph.node(
            "ScatterElements",
            e.plain(x),
            e.plain(index),
            e.plain(updates),
            axis=dim % x.rank,
            reduction=reduction,
        )
        return e.value(name, out.shape, x.dtype)

    return lower


def _extreme(op_type: str, place: str) -> Callable[..., tuple[Value, Value]]:
    def lower(
        e: Emitter, out: Sequence[Spec], x: Value, dim: int, keepdim: bool = False
    ) -> tuple[Value, Value]:
        index = e.graph.node(place, e.plain(x), axis=dim % x.rank, keepdims=int(keepdim))
        return e.reduce(op_type, x, [dim], keep=keepdim), e.value(index, out[1].shape, torch.int64)

    return lower


def _top(
    e: Emitter,
    out: Sequence[Spec],
    x: Value,
    count: int,
    dim: int = -1,
    largest: bool = True,
    *_: bool,
) -> tuple[Value, Value]:
    names = e.graph.nodes(
        "TopK",
        e.plain(x),
        e.graph.ints(count),
        outputs=2,
        attributes={"axis": dim % x.rank, "largest": int(largest), "sorted": 1},
    )
    return e.value(names[0], out[0].shape, x.dtype), e.value(names[1], out[1].shape, torch.int64)


def _sort(
    e: Emitter,
    out: Sequence[Spec],
    x: Value,
    dim: int = -1,
    descending: bool = False,
    **_: object,
) -> tuple[Value, Value]:
    return _top(e, out, x, _known(x.shape[dim], "sort"), dim, descending)


def _cumsum(e: Emitter, out: Spec, x: Value, dim: int, **_: object) -> Value:
    name = e.graph.node(
        "CumSum",
        e.plain(e.cast(x, out.dtype)),
        e.scalar(dim % x.rank, torch.int64).name,
    )
    return e.value(name, out.shape, out.dtype)


LOWERINGS: dict[Any, Callable[..., Any]] = {
    torch.ops.shoal.take.default: _take,
    aten.flip.default: _flip,
    aten.roll.default: _roll,
    aten.repeat.default: _tile,
    aten.index.Tensor: _index,
    aten._unsafe_index.Tensor: _index,  # noqa: SLF001 - its name
    aten.index_put.default: _index_put,
    overload("_unsafe_index_put"): _index_put,
    aten.scatter.src: _scatter("none"),
    aten.scatter.value: _scatter("none"),
    aten.scatter_add.default: _scatter("add"),
    aten.max.dim: _extreme("ReduceMax", "ArgMax"),
    aten.min.dim: _extreme("ReduceMin", "ArgMin"),
    aten.topk.default: _top,
    aten.sort.default: _sort,
    aten.sort.stable: _sort,
    aten.cumsum.default: _cumsum,
}
