"""Lowerings of activations and their gradients, mostly without a choice per element."""

import math
from collections.abc import Callable
from typing import Any

import torch

from fleet_protocol.errors import ExportError
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.rules.elementwise import multiply, step, where
from trainer_export.lowering.values import Spec, Value

aten = torch.ops.aten

_LINEAR = 17.0  # from this value on, softplus(x) equals x in float32


def _threshold_backward(
    emit: Emitter,
    _out: Spec,
    grad: Value,
    x: Value,
    threshold: float,
) -> Value:
    # dx = dy * [x > threshold], the gradient of a ReLU for 0.
    if threshold != 0:
        bound = emit.scalar(threshold, x.dtype)
        x = emit.sub(x, bound)
    passed = step(emit, x)
    return emit.mul(grad, passed)


def _tanh_backward(emit: Emitter, _out: Spec, grad: Value, y: Value) -> Value:
    # dx = dy * (1 - y^2), from the result, so that the argument can be freed.
    unit = emit.scalar(1, y.dtype)
    square = emit.mul(y, y)
    slope = emit.sub(unit, square)
    return emit.mul(grad, slope)


def _sigmoid_backward(emit: Emitter, _out: Spec, grad: Value, y: Value) -> Value:
    # dx = dy * y * (1 - y), from the result as for tanh.
    unit = emit.scalar(1, y.dtype)
    complement = emit.sub(unit, y)
    slope = emit.mul(y, complement)
    return emit.mul(grad, slope)


def _leaky_relu(emit: Emitter, _out: Spec, x: Value, slope: float = 0.01) -> Value:
    return emit.pointwise("LeakyRelu", x, alpha=float(slope))


def _normal_share(emit: Emitter, x: Value) -> tuple[Value, Value]:
    """Return ``s = x / sqrt 2`` and the normal distribution of ``x``, ``(1 + erf(s)) / 2``.

    Gelu and its gradient share both.
    """
    scaled = multiply(emit, x, math.sqrt(0.5))
    # (1 + erf) / 2 in one pass: the error function never leaves the range that HardSigmoid would
    # cut.
    error = emit.pointwise("Erf", scaled)
    return scaled, emit.pointwise("HardSigmoid", error, alpha=0.5, beta=0.5)


def _gelu(emit: Emitter, _out: Spec, x: Value, *, approximate: str = "none") -> Value:
    only_exact(approximate)
    _, share = _normal_share(emit, x)
    return emit.mul(x, share)


def _gelu_backward(
    emit: Emitter,
    _out: Spec,
    grad: Value,
    x: Value,
    *,
    approximate: str = "none",
) -> Value:
    # dx = dy * (share + x * density), the second term as s * exp(-s^2 - log(pi) / 2), so that the #
    # factor of the density needs no separate pass.
    only_exact(approximate)
    scaled, share = _normal_share(emit, x)
    offset = emit.scalar(-0.5 * math.log(math.pi), x.dtype)
    square = emit.mul(scaled, scaled)
    exponent = emit.sub(offset, square)
    exponential = emit.pointwise("Exp", exponent)
    density = emit.mul(scaled, exponential)
    slope = emit.add(share, density)
    return emit.mul(grad, slope)


def only_exact(approximate: str) -> None:
    """Refuse the approximation by tanh, which should have been rewritten before."""
    if approximate != "none":
        raise ExportError(
            f"gelu(approximate={approximate!r}) cannot be exported; use approximate='none'"
        )


def _elu(
    emit: Emitter,
    out: Spec,
    x: Value,
    alpha: float = 1.0,
    scale: float = 1.0,
    input_scale: float = 1.0,
) -> Value:
    # scale * (max(x, 0) + alpha * (exp(min(x, 0) * input_scale) - 1)): one of the two is 0.
    zero = emit.scalar(0, out.dtype)
    below = emit.pointwise("Min", x, zero)
    exponent = multiply(emit, below, input_scale)
    raised = emit.pointwise("Exp", exponent)
    unit = emit.scalar(1, out.dtype)
    low = emit.sub(raised, unit)
    above = emit.pointwise("Relu", x)
    lower = multiply(emit, low, alpha)
    total = emit.add(above, lower)
    return multiply(emit, total, scale)


def _softplus(
    emit: Emitter,
    out: Spec,
    x: Value,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> Value:
    # relu(x) + log1p(z) with z = exp(-|x|) and u = 1 + z; log(u) lacks what the sum lost of z,
    # which (z - (u - 1)) / u gives back.
    bent = multiply(emit, x, beta)
    unit = emit.scalar(1, out.dtype)
    magnitude = emit.pointwise("Abs", bent)
    exponent = emit.pointwise("Neg", magnitude)
    z = emit.pointwise("Exp", exponent)
    u = emit.add(z, unit)
    recovered = emit.sub(u, unit)
    lost = emit.sub(z, recovered)
    correction = emit.div(lost, u)
    logarithm = emit.pointwise("Log", u)
    log = emit.add(logarithm, correction)
    rectified = emit.pointwise("Relu", bent)
    total = emit.add(rectified, log)
    soft = multiply(emit, total, 1 / beta)
    if threshold >= _LINEAR:
        return soft
    scaled = multiply(emit, x, beta)
    bound = emit.scalar(threshold, out.dtype)
    above = emit.pointwise("Greater", scaled, bound, dtype=torch.bool)
    return where(emit, out, above, x, soft)


LOWERINGS: dict[Any, Callable[..., Any]] = {
    aten.softplus.default: _softplus,
    aten.threshold_backward.default: _threshold_backward,
    aten.tanh_backward.default: _tanh_backward,
    aten.sigmoid_backward.default: _sigmoid_backward,
    aten.leaky_relu.default: _leaky_relu,
    aten.elu.default: _elu,
    aten.gelu.default: _gelu,
    aten.gelu_backward.default: _gelu_backward,
}
