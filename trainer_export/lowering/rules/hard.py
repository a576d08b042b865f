"""Lowerings of piecewise linear activations and their gradients, without choices.

A comparison writes bytes, and a choice reads three tensors. A HardSigmoid with the largest slope of
a float computes the same in one pass.
"""

from collections.abc import Callable
from typing import Any

import torch

from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.rules.elementwise import multiply, step
from trainer_export.lowering.values import Spec, Value

aten = torch.ops.aten

_STEEP = 1e38
_WIDEST = 3.0  # half a range that a steep slope times it is still a float32
_FAR = 32.0  # half a range from whose middle a distance has lost digits
_BEND = 3.0  # where hard sigmoid and hard swish bend, above and below 0


def _inside(emit: Emitter, x: Value, low: float, high: float) -> Value:
    """Return 1 where a value is between two bounds, and 0 elsewhere and on the bounds."""
    half = (high - low) / 2
    if half > _FAR:
        lower = emit.scalar(low, x.dtype)
        above = step(emit, emit.sub(x, lower))
        upper = emit.scalar(high, x.dtype)
        below = step(emit, emit.sub(upper, x))
        return emit.mul(above, below)
    middle = (high + low) / 2
    distance = x
    if middle != 0:
        centre = emit.scalar(middle, x.dtype)
        distance = emit.sub(x, centre)
    magnitude = emit.pointwise("Abs", distance)
    slope = _STEEP * min(1.0, _WIDEST / half)
    return emit.pointwise("HardSigmoid", magnitude, alpha=-slope, beta=slope * half)


def _hardtanh_backward(
    emit: Emitter, _out: Spec, grad: Value, x: Value, low: float, high: float
) -> Value:
    # The slope is 1 between the bounds, 0 elsewhere.
    inside = _inside(emit, x, float(low), float(high))
    return emit.mul(grad, inside)


def _hard_sigmoid(emit: Emitter, _out: Spec, x: Value) -> Value:
    return emit.pointwise("HardSigmoid", x, alpha=1 / (2 * _BEND), beta=0.5)


def _hard_sigmoid_backward(emit: Emitter, _out: Spec, grad: Value, x: Value) -> Value:
    # The slope is a sixth between the bends, 0 elsewhere.
    inside = _inside(emit, x, -_BEND, _BEND)
    share = multiply(emit, inside, 1 / (2 * _BEND))
    return emit.mul(grad, share)


def _hard_swish(emit: Emitter, out: Spec, x: Value) -> Value:
    gate = _hard_sigmoid(emit, out, x)
    return emit.mul(x, gate)


def _hard_swish_backward(emit: Emitter, out: Spec, grad: Value, x: Value) -> Value:
    # dx = dy * (s + [-3 < x < 3] * (s - 1/2)) with the hard sigmoid s = x / 6 + 1/2 between them,
    # which is that of the forward pass.
    gate = _hard_sigmoid(emit, out, x)
    half = emit.scalar(0.5, x.dtype)
    slanted = emit.sub(gate, half)
    inside = _inside(emit, x, -_BEND, _BEND)
    product = emit.mul(slanted, inside)
    slope = emit.add(gate, product)
    return emit.mul(grad, slope)


LOWERINGS: dict[Any, Callable[..., Any]] = {
    aten.hardtanh_backward.default: _hardtanh_backward,
    aten.hardsigmoid.default: _hard_sigmoid,
    aten.hardsigmoid_backward.default: _hard_sigmoid_backward,
    aten.hardswish.default: _hard_swish,
    aten.hardswish_backward.default: _hard_swish_backward,
}
