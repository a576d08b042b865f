"""Lowerings of extremes with their places, of sorting, and of running sums."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.rules.places import fixed_size
from trainer_export.lowering.values import Spec, Value

aten = torch.ops.aten


def _extreme(op_type: str, place: str) -> Callable[..., tuple[Value, Value]]:
    # The place is for the gradient, which PyTorch's decomposition scatters to it.
    def lower(
        emit: Emitter,
        out: Sequence[Spec],
        x: Value,
        dim: int,
        keepdim: bool = False,
    ) -> tuple[Value, Value]:
        plain_x = emit.in_logical_order(x)
        index = emit.node(
            place,
            plain_x,
            axis=dim % x.rank,
            keepdims=int(keepdim),
        )
        values = emit.reduce(op_type, x, [dim], keep=keepdim)
        return values, emit.value(index, out[1].shape, torch.int64)

    return lower


def _top(
    emit: Emitter,
    out: Sequence[Spec],
    x: Value,
    count: int,
    dim: int = -1,
    largest: bool = True,
    *_: bool,
) -> tuple[Value, Value]:
    plain_x = emit.in_logical_order(x)
    number = emit.ints(count)
    values, places = emit.nodes(
        "TopK",
        plain_x,
        number,
        outputs=2,
        attributes={"axis": dim % x.rank, "largest": int(largest), "sorted": 1},
    )
    return (
        emit.value(values, out[0].shape, x.dtype),
        emit.value(places, out[1].shape, torch.int64),
    )


def _sort(
    emit: Emitter,
    out: Sequence[Spec],
    x: Value,
    dim: int = -1,
    descending: bool = False,
    **_: object,
) -> tuple[Value, Value]:
    # The runtime has no sort: the largest of all is the whole order.
    return _top(emit, out, x, fixed_size(x.shape[dim], "sort"), dim, descending)


def _cumsum(emit: Emitter, out: Spec, x: Value, dim: int, **_: object) -> Value:
    converted = emit.cast(x, out.dtype)
    source = emit.in_logical_order(converted)
    axis = emit.scalar(dim % x.rank, torch.int64)
    name = emit.node("CumSum", source, axis.name)
    return emit.value(name, out.shape, out.dtype)


LOWERINGS: dict[Any, Callable[..., Any]] = {
    aten.max.dim: _extreme("ReduceMax", "ArgMax"),
    aten.min.dim: _extreme("ReduceMin", "ArgMin"),
    aten.topk.default: _top,
    aten.sort.default: _sort,
    aten.sort.stable: _sort,
    aten.cumsum.default: _cumsum,
}
