"""Lowerings of reductions, softmax and norms of vectors."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fleet_protocol.errors import ExportError
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.rules.elementwise import operand
from trainer_export.lowering.values import Spec, Value, overload

aten = torch.ops.aten


def _along(op_type: str) -> Callable[..., Value]:
    def lower(e: Emitter, _out: Spec, x: Value, dim: int, *_: object) -> Value:
        return e.value(e.graph.node(op_type, e.plain(x), axis=dim % x.rank), x.shape)

    return lower


def _softmax_backward(e: Emitter, _out: Spec, grad: Value, y: Value, dim: int, *_: object) -> Value:
    total = e.reduce("ReduceSum", e.pointwise("Mul", grad, y), [dim], keep=True)
    return e.pointwise("Mul", y, e.pointwise("Sub", grad, total))


def _log_softmax_backward(
    e: Emitter, _out: Spec, grad: Value, y: Value, dim: int, *_: object
) -> Value:
    total = e.reduce("ReduceSum", grad, [dim], keep=True)
    return e.pointwise("Sub", grad, e.pointwise("Mul", e.pointwise("Exp", y), total))


def _reduction(op_type: str) -> Callable[..., Value]:
    def lower(
        e: Emitter,
        out: Spec,
        x: Value,
        dim: Sequence[int] | None = None,
        keepdim: bool = False,
        **_: object,
    ) -> Value:
        return e.reduce(op_type, e.cast(x, out.dtype), list(dim or range(x.rank)), keep=keepdim)

    return lower


def _any(e: Emitter, out: Spec, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    axes = list(range(x.rank)) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return e.cast(e.reduce("ReduceMax", e.cast(x, torch.float32), axes, keep=keepdim), out.dtype)


def _var(
    e: Emitter,
    out: Spec,
    x: Value,
    dim: Any = None,
    correction: float = 1,
    keepdim: bool = False,
) -> Value:
    axes = list(range(x.rank)) if dim is None else [axis % x.rank for axis in dim]
    centred = e.pointwise("Sub", x, e.reduce("ReduceMean", x, axes, keep=True))
    total = e.reduce("ReduceSum", e.pointwise("Mul", centred, centred), axes, keep=keepdim)
    count = e.size_as_float(math.prod(x.shape[axis] for axis in axes))
    return e.pointwise("Div", total, e.pointwise("Sub", count, operand(e, correction, out.dtype)))


def _var_mean(
    e: Emitter,
    out: Sequence[Spec],
    x: Value,
    dim: Any = None,
    *,
    correction: float = 1,
    keepdim: bool = False,
) -> tuple[Value, Value]:
    axes = list(range(x.rank)) if dim is None else list(dim)
    return _var(e, out[0], x, dim, correction, keepdim), e.reduce(
        "ReduceMean", x, axes, keep=keepdim
    )


def _place(op_type: str) -> Callable[..., Value]:
    def lower(
        e: Emitter, out: Spec, x: Value, dim: int | None = None, keepdim: bool = False
    ) -> Value:
        if dim is None:
            x = e.view(x, (math.prod(x.shape),))
            dim = 0
        name = e.graph.node(op_type, e.plain(x), axis=dim % x.rank, keepdims=int(keepdim))
        return e.value(name, out.shape, torch.int64)

    return lower


def _vector_norm(e: Emitter, _out: Spec, x: Value, *args: Any, **_: object) -> Value:
    given: tuple[Any, ...] = (*args, *(2, None, False)[len(args) :])
    order, dim, keepdim = given
    if order == 0:
        raise ExportError(
            "vector norm of order 0 cannot be exported, nor does it train; use order 1 or 2"
        )
    size = e.pointwise("Abs", x)
    axes = list(dim or range(x.rank))
    if x.rank == 0:
        return size
    if order == 2:
        return e.reduce("ReduceL2", x, axes, keep=keepdim)
    if order == 1 or math.isinf(order):
        return e.reduce(
            {1: "ReduceSum", math.inf: "ReduceMax"}.get(order, "ReduceMin"),
            size,
            axes,
            keep=keepdim,
        )
    total = e.reduce(
        "ReduceSum",
        e.pointwise("Pow", size, e.scalar(order, x.dtype)),
        axes,
        keep=keepdim,
    )
    return e.pointwise("Pow", total, e.scalar(1 / order, x.dtype))


LOWERINGS: dict[Any, Callable[..., Any]] = {
    overload("_softmax"): _along("Softmax"),
    overload("_log_softmax"): _along("LogSoftmax"),
    overload("_softmax_backward_data"): _softmax_backward,
    overload("_log_softmax_backward_data"): _log_softmax_backward,
    aten.sum.dim_IntList: _reduction("ReduceSum"),
    aten.mean.dim: _reduction("ReduceMean"),
    aten.amax.default: _reduction("ReduceMax"),
    aten.amin.default: _reduction("ReduceMin"),
    aten.sum.default: _reduction("ReduceSum"),
    aten.mean.default: _reduction("ReduceMean"),
    aten.argmax.default: _place("ArgMax"),
    aten.argmin.default: _place("ArgMin"),
    aten.var.correction: _var,
    aten.var_mean.correction: _var_mean,
    aten.any.default: _any,
    aten.any.dim: _any,
    aten.any.dims: _any,
    aten.linalg_vector_norm.default: _vector_norm,
}
