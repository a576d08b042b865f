"""Lowerings of reductions, softmax and norms of vectors."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fleet_protocol.errors import ExportError
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.rules.elementwise import operand
from trainer_export.lowering.values import Spec, Value, overload, reorder

aten = torch.ops.aten


def _along(op_type: str) -> Callable[..., Value]:
    def lower(emit: Emitter, _out: Spec, x: Value, dim: int, *_: object) -> Value:
        plain_x = emit.in_logical_order(x)
        name = emit.node(op_type, plain_x, axis=dim % x.rank)
        return emit.value(name, x.shape)

    return lower


def _softmax_backward(
    emit: Emitter,
    _out: Spec,
    grad: Value,
    y: Value,
    dim: int,
    *_: object,
) -> Value:
    # dx = y * (dy - sum(dy * y)): the Jacobian diag(y) - y y^T applied without being formed.
    product = emit.mul(grad, y)
    total = emit.reduce("ReduceSum", product, [dim], keep=True)
    centred = emit.sub(grad, total)
    return emit.mul(y, centred)


def _log_softmax_backward(
    emit: Emitter,
    _out: Spec,
    grad: Value,
    y: Value,
    dim: int,
    *_: object,
) -> Value:
    # dx = dy - exp(y) * sum(dy): exp(y) is the softmax, so that x is not needed.
    total = emit.reduce("ReduceSum", grad, [dim], keep=True)
    softmax = emit.pointwise("Exp", y)
    share = emit.mul(softmax, total)
    return emit.sub(grad, share)


def _all_or(dim: Any, rank: int) -> list[int]:
    """Return the axes that an operator names by a number, a list, or None for all axes."""
    if dim is None:
        return list(range(rank))
    return [dim] if isinstance(dim, int) else list(dim)


def _reduction(op_type: str) -> Callable[..., Value]:
    def lower(
        emit: Emitter,
        out: Spec,
        x: Value,
        dim: Sequence[int] | None = None,
        keepdim: bool = False,
        **_: object,
    ) -> Value:
        axes = list(dim or range(x.rank))  # an empty list means all, too
        converted = emit.cast(x, out.dtype)
        return emit.reduce(op_type, converted, axes, keep=keepdim)

    return lower


def _any(emit: Emitter, out: Spec, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    # The maximum of numbers, because ONNX reduces no booleans.
    axes = _all_or(dim, x.rank)
    numbers = emit.cast(x, torch.float32)
    largest = emit.reduce("ReduceMax", numbers, axes, keep=keepdim)
    return emit.cast(largest, out.dtype)


def _var(
    emit: Emitter,
    out: Spec,
    x: Value,
    dim: Any = None,
    correction: float = 1,
    keepdim: bool = False,
) -> Value:
    # sum((x - mean)^2) / (n - correction), from differences: squares of large numbers lose digits.
    axes = [axis % x.rank for axis in _all_or(dim, x.rank)]
    mean = emit.mean(x, axes)
    centred = emit.sub(x, mean)
    squares = emit.mul(centred, centred)
    total = emit.reduce("ReduceSum", squares, axes, keep=keepdim)
    count = emit.size_as_float(math.prod(reorder(x.shape, axes)))
    lost = operand(emit, correction, out.dtype)
    freedom = emit.sub(count, lost)
    return emit.div(total, freedom)


def _var_mean(
    emit: Emitter,
    out: Sequence[Spec],
    x: Value,
    dim: Any = None,
    *,
    correction: float = 1,
    keepdim: bool = False,
) -> tuple[Value, Value]:
    variance = _var(emit, out[0], x, dim, correction, keepdim)
    return variance, emit.reduce("ReduceMean", x, _all_or(dim, x.rank), keep=keepdim)


def _place(op_type: str) -> Callable[..., Value]:
    def lower(
        emit: Emitter,
        out: Spec,
        x: Value,
        dim: int | None = None,
        keepdim: bool = False,
    ) -> Value:
        if dim is None:
            x = emit.view(x, (math.prod(x.shape),))
            dim = 0
        axis = dim % x.rank
        plain_x = emit.in_logical_order(x)
        name = emit.node(op_type, plain_x, axis=axis, keepdims=int(keepdim))
        return emit.value(name, out.shape, torch.int64)

    return lower


_NORMS = {1: "ReduceSum", math.inf: "ReduceMax", -math.inf: "ReduceMin"}
"""Reductions of sizes that are norms, by order."""


def _vector_norm(
    emit: Emitter,
    _out: Spec,
    x: Value,
    order: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    **_: object,
) -> Value:
    # sum(|x|^order)^(1 / order), with one reduction where ONNX has it.
    if order == 0:
        raise ExportError(
            "a vector norm of order 0 cannot be exported and has no useful gradient; use"
            " order 1 or 2"
        )
    size = emit.pointwise("Abs", x)
    axes = list(dim or range(x.rank))
    if x.rank == 0:
        return size
    if order == 2:
        return emit.reduce("ReduceL2", x, axes, keep=keepdim)
    if order in _NORMS:
        return emit.reduce(_NORMS[order], size, axes, keep=keepdim)
    exponent = emit.scalar(order, x.dtype)
    powers = emit.pointwise("Pow", size, exponent)
    total = emit.reduce("ReduceSum", powers, axes, keep=keepdim)
    root = emit.scalar(1 / order, x.dtype)
    return emit.pointwise("Pow", total, root)


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
