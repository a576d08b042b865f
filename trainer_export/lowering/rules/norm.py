"""Lowerings of layer norm and static batch norm with their gradients in closed form."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from trainer_export import operators  # noqa: F401 - registers shoal::static_batch_norm
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.rules.elementwise import multiply
from trainer_export.lowering.values import Spec, Value, reorder

aten = torch.ops.aten


def _layer_norm(emit: Emitter, out: Sequence[Spec], x: Value, *settings: Any) -> tuple[Value, ...]:
    # y = (x - m) / sqrt(var + eps) * weight + bias, by the runtime's operator on the centred
    # values. Runtimes before 1.31 lose the variance if the mean is much larger; the difference is
    # needed anyway.
    sizes, weight, bias, eps = settings
    axis = x.rank - len(sizes)
    mean = emit.mean(x, range(axis, x.rank))
    centred = emit.sub(x, mean)
    if weight is not None:
        scale = emit.in_logical_order(weight)
    else:
        scale = emit.constant(np.ones(tuple(sizes), np.float32))
    name = emit.in_logical_order(centred)
    shape = x.shape
    if len(sizes) == 1:
        # Rows before a reshape of the leading axes, because the operator needs only rows.
        name, shape = emit.unfolded(name, shape)
        axis = len(shape) - 1
    inputs = [name, scale]
    if bias is not None:
        inputs.append(emit.in_logical_order(bias))
    names = emit.nodes(
        "LayerNormalization",
        *inputs,
        outputs=3,
        attributes={"axis": axis, "epsilon": eps},
    )
    moment = (*shape[:axis], *[1] * len(sizes))
    results = []
    for name, physical, spec in zip(names, (shape, moment, moment), out, strict=True):
        reshaped = emit.reshaped(name, physical, spec.shape)
        results.append(emit.value(reshaped, spec.shape))
    # The operator's own mean is the mean of centred values, so it is close to 0.
    return results[0], mean, results[2]


def _layer_norm_backward(
    emit: Emitter,
    _out: Sequence[Spec | None],
    grad: Value,
    x: Value,
    *saved: Any,
) -> tuple[Value | None, ...]:
    # With n = (x - m) / s and g = dy * weight:
    #     dx = (g - mean(g) - n * mean(g * n)) / s,  dweight = sum dy * n,  dbias = sum dy
    # Both means take the weight inside, because mean(dy * weight) is one product with a vector.
    sizes, mean, inverse, weight, _, mask = saved
    inner = list(range(x.rank - len(sizes), x.rank))
    outer = list(range(x.rank - len(sizes)))
    centred_x = emit.sub(x, mean)
    normal = emit.mul(centred_x, inverse)
    product = emit.mul(grad, normal)
    grad_x = grad_weight = grad_bias = None
    if mask[0]:
        upper = grad if weight is None else emit.mul(grad, weight)
        mean_product = _weighted_mean(emit, product, weight, inner)
        slope = emit.mul(normal, mean_product)
        mean_grad = _weighted_mean(emit, grad, weight, inner)
        centred = emit.sub(upper, mean_grad)
        sloped = emit.sub(centred, slope)
        grad_x = emit.mul(sloped, inverse)
    if mask[1]:
        grad_weight = emit.reduce("ReduceSum", product, outer, keep=False)
    if mask[2]:
        grad_bias = emit.reduce("ReduceSum", grad, outer, keep=False)
    return grad_x, grad_weight, grad_bias


def _weighted_mean(emit: Emitter, x: Value, weight: Value | None, inner: list[int]) -> Value:
    """Return the mean of ``x * weight`` over the normalised axes, kept with size 1.

    Over one axis it is a product with a vector.
    """
    if weight is None:
        return emit.mean(x, inner)
    if len(inner) > 1:
        weighted = emit.mul(x, weight)
        return emit.mean(weighted, inner)
    count = x.shape[-1]
    scaled_weight = multiply(emit, weight, 1 / count)
    column = emit.view(scaled_weight, (count, 1))
    plain_x = emit.in_logical_order(x)
    rows, shape = emit.unfolded(plain_x, x.shape)
    name = emit.node("MatMul", rows, column.name)
    kept = (*x.shape[:-1], 1)
    means = emit.reshaped(name, (*shape[:-1], 1), kept)
    return emit.value(means, kept)


def _channels(emit: Emitter, vector: Value, rank: int) -> Value:
    """Return a vector over the channels in a shape that broadcasts to a feature map."""
    return emit.view(vector, (1, vector.shape[0], *(1,) * (rank - 2)))


def _moments(emit: Emitter, x: Value, eps: float) -> tuple[Value, Value]:
    """Return ``x - mean`` and ``1 / sqrt(var + eps)``, the second [1, channels, 1, ...].

    Forward and backward pass request equal nodes, which the graph contains once.
    """
    axes = [0, *range(2, x.rank)]
    mean = emit.mean(x, axes)
    centred = emit.sub(x, mean)
    # From the differences: a mean of squares minus a square of the mean loses digits.
    squares = emit.mul(centred, centred)
    variance = emit.mean(squares, axes)
    epsilon = emit.scalar(eps, x.dtype)
    shifted = emit.add(variance, epsilon)
    deviation = emit.pointwise("Sqrt", shifted)
    return centred, emit.pointwise("Reciprocal", deviation)


def _static_batch_norm(
    emit: Emitter,
    _out: Spec,
    x: Value,
    weight: Value,
    bias: Value,
    eps: float,
) -> Value:
    # y = (x - m) * (r * weight) + bias with r = 1 / sqrt(var + eps): the factor of a channel is
    # computed once, so that two passes over the feature map are enough.
    x = emit.full(x)
    centred, inverse = _moments(emit, x, eps)
    weights = _channels(emit, weight, x.rank)
    scale = emit.mul(inverse, weights)
    scaled = emit.mul(centred, scale)
    shift = _channels(emit, bias, x.rank)
    return emit.add(scaled, shift)


def _static_batch_norm_backward(
    emit: Emitter,
    _out: Sequence[Spec],
    grad: Value,
    x: Value,
    weight: Value,
    eps: float,
) -> tuple[Value, Value, Value]:
    # With c = x - m, r = 1 / sqrt(var + eps) and p = mean(dy * c) * r over samples and positions:
    #     dx = (dy - c * p * r - mean(dy)) * r * weight,  dweight = count * p,  dbias = count * mean
    # Means are used for both, so that sums over the feature map are taken once each.
    x = emit.full(x)
    grad = emit.full(grad)
    centred, inverse = _moments(emit, x, eps)
    axes = [0, *range(2, x.rank)]
    count = emit.size_as_float(math.prod(reorder(x.shape, axes)))
    mean = emit.mean(grad, axes)
    centred_grad = emit.mul(grad, centred)
    covariance = emit.mean(centred_grad, axes)
    product = emit.mul(covariance, inverse)
    scaled_product = emit.mul(product, inverse)
    slope = emit.mul(centred, scaled_product)
    straight = emit.sub(grad, slope)
    weights = _channels(emit, weight, x.rank)
    scale = emit.mul(inverse, weights)
    projected = emit.sub(straight, mean)
    grad_x = emit.mul(projected, scale)
    total_product = emit.mul(product, count)
    grad_weight = emit.view(total_product, weight.shape)
    total = emit.mul(mean, count)
    grad_bias = emit.view(total, weight.shape)
    return grad_x, grad_weight, grad_bias


LOWERINGS: dict[Any, Callable[..., Any]] = {
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    torch.ops.shoal.static_batch_norm.default: _static_batch_norm,
    torch.ops.shoal.static_batch_norm_backward.default: _static_batch_norm_backward,
}
