"""Lowerings of element-wise operators, comparisons, reductions and constants."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fleet_protocol.errors import ExportError
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.values import Dim, Spec, Value, numpy_dtype, overload

aten = torch.ops.aten

# HardSigmoid is max(0, min(1, alpha * x + beta)): with the largest slope a float holds it is the
# step function, in one vectorised pass. Greater + Cast takes eight times as long, Where fifty times
# (onnxruntime 1.19, 1.6 M elements).
_STEEPEST = 3e38
_LINEAR = 17.0  # from here on the softplus of a number is the number, in float32

UNARY = """
Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Erf Exp Floor Log Neg Reciprocal Relu Round
Sigmoid Sign Sin Sinh Sqrt Tan Tanh
"""
"""Operators of ONNX that torch has under the same name."""


def operand(e: Emitter, value: Value | complex | Dim, dtype: torch.dtype) -> Value:
    """A number, a size or a value as a value of the given type."""
    if isinstance(value, Value):
        return e.cast(value, dtype)
    return (
        e.scalar(value, dtype)
        if isinstance(value, (int, float, bool))
        else e.cast(e.size_as_float(value), dtype)
    )


def step(e: Emitter, value: Value) -> Value:
    """1 where ``value`` is above 0, else 0, in its own type (float32)."""
    return e.pointwise("HardSigmoid", value, alpha=_STEEPEST, beta=0.0)


def multiply(e: Emitter, value: Value, factor: float) -> Value:
    """A value times a number, nothing at all for 1."""
    return value if factor == 1.0 else e.pointwise("Mul", value, e.scalar(factor, value.dtype))


def _unary(op_type: str) -> Callable[..., Value]:
    def lower(e: Emitter, out: Spec, x: Value) -> Value:
        return e.pointwise(op_type, e.cast(x, out.dtype))

    return lower


def _binary(op_type: str) -> Callable[..., Value]:
    def lower(e: Emitter, out: Spec, a: Any, b: Any) -> Value:
        if op_type == "Mul" and out.dtype == torch.bool:
            return e.pointwise("And", a, b)
        if isinstance(b, (int, float)) and b == (1 if op_type in ("Mul", "Div") else None):
            return operand(e, a, out.dtype)
        return e.pointwise(op_type, operand(e, a, out.dtype), operand(e, b, out.dtype))

    return lower


def _compare(op_type: str, *, negate: bool = False) -> Callable[..., Value]:
    def lower(e: Emitter, out: Spec, a: Any, b: Any) -> Value:
        dtype = torch.result_type(_example(a), _example(b))
        result = e.pointwise(op_type, operand(e, a, dtype), operand(e, b, dtype), dtype=out.dtype)
        return e.pointwise("Not", result) if negate else result

    return lower


def _example(value: Any) -> Any:
    if not isinstance(value, Value):
        return value if isinstance(value, (int, float)) else 1
    return torch.empty((1,) * value.rank, dtype=value.dtype)


def _scaled(op_type: str) -> Callable[..., Value]:
    def lower(e: Emitter, out: Spec, a: Any, b: Any, *, alpha: float = 1) -> Value:
        left = operand(e, a, out.dtype)
        right = operand(e, b, out.dtype)
        return e.pointwise(op_type, left, multiply(e, right, alpha))

    return lower


def _div(e: Emitter, out: Spec, a: Any, b: Any, *, rounding_mode: str | None = None) -> Value:
    a = operand(e, a, out.dtype)
    b = operand(e, b, out.dtype)
    result = e.pointwise("Div", a, b)
    if (
        rounding_mode == "floor"
    ):  # by the rest, as in PyTorch: the quotient of 1 and 0.1 is rounded up, and its floor is 9
        rest = e.pointwise("Mod", a, b, fmod=1)
        below = e.pointwise(
            "Less",
            e.pointwise("Mul", rest, b),
            e.scalar(0, out.dtype),
            dtype=torch.bool,
        )
        whole = e.pointwise("Div", e.pointwise("Sub", a, rest), b)
        if not out.dtype.is_floating_point:
            return e.pointwise("Sub", whole, e.cast(below, out.dtype))
        found = e.pointwise("Sub", e.pointwise("Round", whole), e.cast(below, out.dtype))
        none = e.pointwise("Equal", b, e.scalar(0, out.dtype), dtype=torch.bool)
        return e.pointwise("Where", none, result, found, dtype=out.dtype)
    if rounding_mode is None or not out.dtype.is_floating_point:
        return result
    return e.pointwise(
        "Mul",
        e.pointwise("Sign", result),
        e.pointwise("Floor", e.pointwise("Abs", result)),
    )


def _pow(e: Emitter, out: Spec, x: Any, exponent: Any) -> Value:
    x = operand(e, x, out.dtype)
    if exponent == 2:
        return e.pointwise("Mul", x, x)
    if exponent == 3:
        return e.pointwise("Mul", e.pointwise("Mul", x, x), x)
    return (
        e.pointwise("Sqrt", x)
        if exponent == 0.5
        else e.pointwise("Pow", x, operand(e, exponent, out.dtype))
    )


def _rsqrt(e: Emitter, out: Spec, x: Value) -> Value:
    return e.pointwise("Reciprocal", e.pointwise("Sqrt", e.cast(x, out.dtype)))


def _log1p(e: Emitter, out: Spec, x: Value) -> Value:
    """``x * log(u) / (u - 1)`` with ``u = 1 + x``: what the sum loses of a small x, the quotient
    gives back.
    """
    x = e.cast(x, out.dtype)
    one = e.scalar(1, out.dtype)
    whole = e.pointwise("Add", x, one)
    kept = e.pointwise("Sub", whole, one)
    log = e.pointwise("Log", whole)
    exact = e.pointwise(
        "Equal", kept, x, dtype=torch.bool
    )  # infinity too, of which there is no quotient
    large = replace(
        e.pointwise("Where", exact, log, e.pointwise("Div", e.pointwise("Mul", x, log), kept)),
        dtype=out.dtype,
    )
    nothing = e.pointwise("Equal", kept, e.scalar(0, out.dtype), dtype=torch.bool)
    return replace(e.pointwise("Where", nothing, x, large), dtype=out.dtype)


def _expm1(e: Emitter, out: Spec, x: Value) -> Value:
    """``tanh(x / 2) * (exp(x) + 1)``, which loses nothing of a small x."""
    x = e.cast(x, out.dtype)
    more = e.pointwise("Add", e.pointwise("Exp", x), e.scalar(1, out.dtype))
    return e.pointwise("Mul", e.pointwise("Tanh", multiply(e, x, 0.5)), more)


def _softplus(e: Emitter, out: Spec, x: Value, beta: float = 1.0, threshold: float = 20.0) -> Value:
    """``relu(x) + log1p(z)`` with ``z = exp(-|x|)``, whose sum with 1 is put right by ``(z - (u -
    1)) / u``.
    """
    bent = multiply(e, x, beta)
    one = e.scalar(1, out.dtype)
    rest = e.pointwise("Exp", e.pointwise("Neg", e.pointwise("Abs", bent)))
    whole = e.pointwise("Add", rest, one)
    lost = e.pointwise("Div", e.pointwise("Sub", rest, e.pointwise("Sub", whole, one)), whole)
    log = e.pointwise("Add", e.pointwise("Log", whole), lost)
    soft = multiply(e, e.pointwise("Add", e.pointwise("Relu", bent), log), 1 / beta)
    if threshold >= _LINEAR:
        return soft
    above = e.pointwise(
        "Greater",
        multiply(e, x, beta),
        e.scalar(threshold, out.dtype),
        dtype=torch.bool,
    )
    return _where(e, out, above, x, soft)


def _clamp(e: Emitter, out: Spec, x: Value, low: Any = None, high: Any = None) -> Value:
    x = e.cast(x, out.dtype)
    if low is not None:
        x = e.pointwise("Max", x, operand(e, low, out.dtype))
    return x if high is None else e.pointwise("Min", x, operand(e, high, out.dtype))


def _where(e: Emitter, out: Spec, condition: Value, a: Any, b: Any) -> Value:
    choice = e.pointwise("Where", condition, operand(e, a, out.dtype), operand(e, b, out.dtype))
    return replace(choice, dtype=out.dtype)


def _threshold_backward(e: Emitter, _out: Spec, grad: Value, x: Value, threshold: float) -> Value:
    if threshold != 0:
        x = e.pointwise("Sub", x, e.scalar(threshold, x.dtype))
    return e.pointwise("Mul", grad, step(e, x))


def _tanh_backward(e: Emitter, _out: Spec, grad: Value, y: Value) -> Value:
    return e.pointwise(
        "Mul", grad, e.pointwise("Sub", e.scalar(1, y.dtype), e.pointwise("Mul", y, y))
    )


def _sigmoid_backward(e: Emitter, _out: Spec, grad: Value, y: Value) -> Value:
    return e.pointwise(
        "Mul", grad, e.pointwise("Mul", y, e.pointwise("Sub", e.scalar(1, y.dtype), y))
    )


def _normal_share(e: Emitter, x: Value) -> tuple[Value, Value]:
    """``s = x / sqrt 2`` and the normal distribution of ``x``; shared by gelu and its gradient."""
    scaled = multiply(e, x, math.sqrt(0.5))
    # (1 + erf) / 2 in one pass: the error function never leaves the range that HardSigmoid would
    # cut.
    return scaled, e.pointwise("HardSigmoid", e.pointwise("Erf", scaled), alpha=0.5, beta=0.5)


def _gelu(e: Emitter, _out: Spec, x: Value, *, approximate: str = "none") -> Value:
    only_exact(approximate)
    return e.pointwise("Mul", x, _normal_share(e, x)[1])


def _gelu_backward(
    e: Emitter, _out: Spec, grad: Value, x: Value, *, approximate: str = "none"
) -> Value:
    """``share + x * density``, the second term as ``s * exp(-s^2 - log(pi) / 2)``."""
    only_exact(approximate)
    scaled, share = _normal_share(e, x)
    exponent = e.pointwise(
        "Sub",
        e.scalar(-0.5 * math.log(math.pi), x.dtype),
        e.pointwise("Mul", scaled, scaled),
    )
    density = e.pointwise("Mul", scaled, e.pointwise("Exp", exponent))
    return e.pointwise("Mul", grad, e.pointwise("Add", share, density))


def only_exact(approximate: str) -> None:
    """Refuse the approximation by tanh, which is rewritten before."""
    if approximate != "none":
        raise ExportError(
            f"gelu(approximate={approximate!r}) cannot be exported; use the exact one"
        )


def _elu(
    e: Emitter,
    out: Spec,
    x: Value,
    alpha: float = 1.0,
    scale: float = 1.0,
    input_scale: float = 1.0,
) -> Value:
    """``scale * (max(x, 0) + alpha * (exp(min(x, 0) * input_scale) - 1))``, without a choice per
    element.
    """
    raised = e.pointwise(
        "Exp", multiply(e, e.pointwise("Min", x, e.scalar(0, out.dtype)), input_scale)
    )
    low = e.pointwise("Sub", raised, e.scalar(1, out.dtype))
    return multiply(e, e.pointwise("Add", e.pointwise("Relu", x), multiply(e, low, alpha)), scale)


def _filled(value: float) -> Callable[..., Value]:
    def lower(e: Emitter, out: Spec, *_: object, **__: object) -> Value:
        return fill(e, out, value)

    return lower


def fill(e: Emitter, out: Spec, value: float) -> Value:
    """A tensor of one number, kept as a scalar until a consumer needs it whole."""
    ones = (1,) * len(out.shape)
    name = e.graph.constant(np.full(ones, value, numpy_dtype(out.dtype)))
    return Value(name, out.shape, out.dtype, ones, tuple(range(len(ones))))


def _full(e: Emitter, out: Spec, _size: Any, value: Any, **_: object) -> Value:
    if isinstance(value, Value):
        return replace(
            fill(e, out, 0),
            name=e.view(e.cast(value, out.dtype), (1,) * len(out.shape)).name,
        )
    return fill(e, out, value)


def _arange(e: Emitter, out: Spec, *bounds: Any, **_: object) -> Value:
    start, end, step_size = {1: (0, *bounds, 1), 2: (*bounds, 1), 3: bounds}[len(bounds)]
    if all(isinstance(b, (int, float)) for b in (start, end, step_size)):
        values = np.arange(start, end, step_size, dtype=numpy_dtype(out.dtype))
        return e.value(e.graph.constant(values), values.shape, out.dtype)
    names = [operand(e, b, torch.int64).name for b in (start, end, step_size)]
    return e.cast(e.value(e.graph.node("Range", *names), out.shape, torch.int64), out.dtype)


def _converted(e: Emitter, out: Spec, value: Any, **_: object) -> Value:
    return operand(e, value, out.dtype)


def _same(_e: Emitter, _out: Spec, x: Value, *_: object, **__: object) -> Value:
    return x


_WITH_NUMBERS: dict[str, Callable[..., Value]] = {
    "add": _scaled("Add"),
    "sub": _scaled("Sub"),
    "rsub": lambda e, out, a, b, alpha=1: _scaled("Sub")(e, out, b, a, alpha=alpha),
    "mul": _binary("Mul"),
    "div": _div,
    "fmod": lambda e, out, a, b: e.pointwise(
        "Mod", operand(e, a, out.dtype), operand(e, b, out.dtype), fmod=1
    ),
    "masked_fill": lambda e, out, x, mask, value: _where(e, out, mask, value, x),
    "eq": _compare("Equal"),
    "ne": _compare("Equal", negate=True),
    "lt": _compare("Less"),
    "le": _compare("LessOrEqual"),
    "gt": _compare("Greater"),
    "ge": _compare("GreaterOrEqual"),
}
LOWERINGS: dict[Any, Callable[..., Any]] = {
    aten.div.Tensor_mode: _div,
    aten.div.Scalar_mode: _div,
    aten.maximum.default: _binary("Max"),
    aten.minimum.default: _binary("Min"),
    aten.pow.Tensor_Scalar: _pow,
    aten.pow.Tensor_Tensor: _pow,
    aten.pow.Scalar: _pow,
    aten.rsqrt.default: _rsqrt,
    aten.log1p.default: _log1p,
    aten.expm1.default: _expm1,
    aten.softplus.default: _softplus,
    aten.clamp.default: _clamp,
    aten.clamp.Tensor: _clamp,
    aten.clamp_min.default: _clamp,
    aten.clamp_max.default: lambda e, out, x, high: _clamp(e, out, x, None, high),
    aten.where.self: _where,
    aten.threshold_backward.default: _threshold_backward,
    aten.tanh_backward.default: _tanh_backward,
    aten.sigmoid_backward.default: _sigmoid_backward,
    aten.elu.default: _elu,
    aten.hardtanh.default: lambda e, out, x, low=-1.0, high=1.0: _clamp(e, out, x, low, high),
    aten.leaky_relu.default: lambda e, _, x, slope=0.01: e.pointwise(
        "LeakyRelu", x, alpha=float(slope)
    ),
    aten.gelu.default: _gelu,
    aten.gelu_backward.default: _gelu_backward,
    aten.full.default: _full,
    aten.full_like.default: lambda e, out, x, value, **_: _full(e, out, x, value),
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    aten.scalar_tensor.default: _converted,
    overload("_to_copy"): _converted,
    aten.isnan.default: lambda e, out, x: _compare("Equal", negate=True)(e, out, x, x),
    aten.logical_not.default: _unary("Not"),
    aten.bitwise_not.default: _unary("Not"),
    aten.logical_and.default: _binary("And"),
    aten.bitwise_and.Tensor: _binary("And"),
    aten.logical_or.default: _binary("Or"),
    aten.bitwise_or.Tensor: _binary("Or"),
}
_FILLED = {
    0: (
        "zeros",
        "zeros_like",
        "new_zeros",
        "new_empty",
        "new_empty_strided",
        "empty_like",
    ),
    1: ("ones", "ones_like", "new_ones"),
}
LOWERINGS |= {
    getattr(aten, name).default: _filled(value)
    for value, names in _FILLED.items()
    for name in names
}
LOWERINGS |= {getattr(aten, op_type.lower()).default: _unary(op_type) for op_type in UNARY.split()}
LOWERINGS |= {
    getattr(aten, name).default: _same
    for name in ("detach", "clone", "alias", "lift_fresh_copy", "contiguous")
}
LOWERINGS |= {
    getattr(getattr(aten, name), kind): lower
    for name, lower in _WITH_NUMBERS.items()
    for kind in ("Tensor", "Scalar")
}
