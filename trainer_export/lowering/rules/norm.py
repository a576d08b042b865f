"""Lowerings of layer norm and static batch norm with their gradients in closed form."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from trainer_export import operators  # noqa: F401 - registers shoal::static_batch_norm
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.rules.elementwise import multiply
from trainer_export.lowering.values import Spec, Value

aten = torch.ops.aten


def _layer_norm(e: Emitter, out: Sequence[Spec], x: Value, *settings: Any) -> tuple[Value, ...]:
    sizes, weight, bias, eps = settings
    axis = x.rank - len(sizes)
    # Runtimes before 1.31 lose the variance in the digits of a much larger mean; the difference is
    # needed anyway.
    mean = e.reduce("ReduceMean", x, range(axis, x.rank), keep=True)
    centred = e.pointwise("Sub", x, mean)
    scale = (
        e.plain(weight)
        if weight is not None
        else e.graph.constant(np.ones(tuple(sizes), np.float32))
    )
    name = e.plain(centred)
    shape = x.shape
    if len(sizes) == 1:
        name, shape = e.unfolded(name, shape)
        axis = len(shape) - 1
    inputs = [name, scale, *([e.plain(bias)] if bias is not None else [])]
    names = e.graph.nodes(
        "LayerNormalization",
        *inputs,
        outputs=3,
        attributes={"axis": axis, "epsilon": eps},
    )
    found = (shape, *[(*shape[:axis], *[1] * len(sizes))] * 2)
    normal, _, inverse = (
        e.value(e.reshaped(name, lying, spec.shape), spec.shape)
        for name, lying, spec in zip(names, found, out, strict=True)
    )
    return normal, mean, inverse


def _layer_norm_backward(
    e: Emitter, _out: Sequence[Spec | None], grad: Value, x: Value, *saved: Any
) -> tuple[Value | None, ...]:
    sizes, mean, inverse, weight, _, mask = saved
    inner = list(range(x.rank - len(sizes), x.rank))
    outer = list(range(x.rank - len(sizes)))
    normal = e.pointwise("Mul", e.pointwise("Sub", x, mean), inverse)
    product = e.pointwise("Mul", grad, normal)
    grad_x = grad_weight = grad_bias = None
    if mask[0]:
        upper = grad if weight is None else e.pointwise("Mul", grad, weight)
        slope = e.pointwise("Mul", normal, _weighted_mean(e, product, weight, inner))
        centred = e.pointwise("Sub", upper, _weighted_mean(e, grad, weight, inner))
        grad_x = e.pointwise("Mul", e.pointwise("Sub", centred, slope), inverse)
    if mask[1]:
        grad_weight = e.reduce("ReduceSum", product, outer, keep=False)
    if mask[2]:
        grad_bias = e.reduce("ReduceSum", grad, outer, keep=False)
    return grad_x, grad_weight, grad_bias


def _weighted_mean(e: Emitter, x: Value, weight: Value | None, inner: list[int]) -> Value:
    """The mean of ``x * weight`` over the normalised axes, kept with size 1.

    Over one axis a product with a vector.
    """
    if weight is None or len(inner) > 1:
        return e.reduce(
            "ReduceMean",
            x if weight is None else e.pointwise("Mul", x, weight),
            inner,
            keep=True,
        )
    count = x.shape[-1]
    column = e.view(multiply(e, weight, 1 / count), (count, 1))
    rows, shape = e.unfolded(e.plain(x), x.shape)
    name = e.graph.node("MatMul", rows, column.name)
    kept = (*x.shape[:-1], 1)
    return e.value(e.reshaped(name, (*shape[:-1], 1), kept), kept)


def _channels(e: Emitter, vector: Value, rank: int) -> Value:
    """A vector over the channels, ready to meet a feature map."""
    return e.view(vector, (1, vector.shape[0], *(1,) * (rank - 2)))


def _moments(e: Emitter, x: Value, eps: float) -> tuple[Value, Value]:
    """``x - mean`` and ``1 / sqrt(var + eps)`` [1, channels, 1, ...], equal nodes for forward and
    backward pass.
    """
    axes = [0, *range(2, x.rank)]
    centred = e.pointwise("Sub", x, e.reduce("ReduceMean", x, axes, keep=True))
    variance = e.reduce("ReduceMean", e.pointwise("Mul", centred, centred), axes, keep=True)
    deviation = e.pointwise("Sqrt", e.pointwise("Add", variance, e.scalar(eps, x.dtype)))
    return centred, e.pointwise("Reciprocal", deviation)


def _static_batch_norm(
    e: Emitter, _out: Spec, x: Value, weight: Value, bias: Value, eps: float
) -> Value:
    x = e.full(x)
    centred, inverse = _moments(e, x, eps)
    scale = e.pointwise("Mul", inverse, _channels(e, weight, x.rank))
    return e.pointwise("Add", e.pointwise("Mul", centred, scale), _channels(e, bias, x.rank))


def _static_batch_norm_backward(
    e: Emitter, _out: Sequence[Spec], grad: Value, x: Value, weight: Value, eps: float
) -> tuple[Value, Value, Value]:
    x = e.full(x)
    grad = e.full(grad)
    centred, inverse = _moments(e, x, eps)
    axes = [0, *range(2, x.rank)]
    count = e.size_as_float(math.prod(x.shape[axis] for axis in axes))
    mean = e.reduce("ReduceMean", grad, axes, keep=True)
    product = e.pointwise(
        "Mul",
        e.reduce("ReduceMean", e.pointwise("Mul", grad, centred), axes, keep=True),
        inverse,
    )
    straight = e.pointwise(
        "Sub", grad, e.pointwise("Mul", centred, e.pointwise("Mul", product, inverse))
    )
    scale = e.pointwise("Mul", inverse, _channels(e, weight, x.rank))
    grad_x = e.pointwise("Mul", e.pointwise("Sub", straight, mean), scale)
    grad_weight, grad_bias = (
        e.view(e.pointwise("Mul", value, count), weight.shape) for value in (product, mean)
    )
    return grad_x, grad_weight, grad_bias


LOWERINGS: dict[Any, Callable[..., Any]] = {
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    torch.ops.shoal.static_batch_norm.default: _static_batch_norm,
    torch.ops.shoal.static_batch_norm_backward.default: _static_batch_norm_backward,
}
