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


def operand(emit: Emitter, value: Value | complex | Dim, dtype: torch.dtype) -> Value:
    """A number, a size or a value as a value of the given type."""
    if isinstance(value, Value):
        return emit.cast(value, dtype)
    return (
        emit.scalar(value, dtype)
        if isinstance(value, (int, float, bool))
        else emit.cast(emit.size_as_float(value), dtype)
    )


def step(emit: Emitter, value: Value) -> Value:
    """1 where ``value`` is above 0, else 0, in its own type (float32)."""
    return emit.pointwise("HardSigmoid", value, alpha=_STEEPEST, beta=0.0)


def multiply(emit: Emitter, value: Value, factor: float) -> Value:
    """A value times a number, nothing at all for 1."""
    return (
        value if factor == 1.0 else emit.pointwise("Mul", value, emit.scalar(factor, value.dtype))
    )


def _unary(op_type: str) -> Callable[..., Value]:
    def lower(emit: Emitter, out: Spec, x: Value) -> Value:
        return emit.pointwise(op_type, emit.cast(x, out.dtype))

    return lower


def _binary(op_type: str) -> Callable[..., Value]:
    def lower(emit: Emitter, out: Spec, a: Any, b: Any) -> Value:
        if op_type == "Mul" and out.dtype == torch.bool:
            return emit.pointwise("And", a, b)
        if isinstance(b, (int, float)) and b == (1 if op_type in ("Mul", "Div") else None):
            return operand(emit, a, out.dtype)
        return emit.pointwise(op_type, operand(emit, a, out.dtype), operand(emit, b, out.dtype))

    return lower


def _compare(op_type: str, *, negate: bool = False) -> Callable[..., Value]:
    def lower(emit: Emitter, out: Spec, a: Any, b: Any) -> Value:
        dtype = torch.result_type(_example(a), _example(b))
        result = emit.pointwise(
            op_type, operand(emit, a, dtype), operand(emit, b, dtype), dtype=out.dtype
        )
        return emit.pointwise("Not", result) if negate else result

    return lower


def _example(value: Any) -> Any:
    if not isinstance(value, Value):
        return value if isinstance(value, (int, float)) else 1
    return torch.empty((1,) * value.rank, dtype=value.dtype)


def _scaled(op_type: str) -> Callable[..., Value]:
    def lower(emit: Emitter, out: Spec, a: Any, b: Any, *, alpha: float = 1) -> Value:
        left = operand(emit, a, out.dtype)
        right = operand(emit, b, out.dtype)
        return emit.pointwise(op_type, left, multiply(emit, right, alpha))

    return lower


def _div(emit: Emitter, out: Spec, a: Any, b: Any, *, rounding_mode: str | None = None) -> Value:
    a = operand(emit, a, out.dtype)
    b = operand(emit, b, out.dtype)
    result = emit.pointwise("Div", a, b)
    if (
        rounding_mode == "floor"
    ):  # by the rest, as in PyTorch: the quotient of 1 and 0.1 is rounded up, and its floor is 9
        rest = emit.pointwise("Mod", a, b, fmod=1)
        below = emit.pointwise(
            "Less",
            emit.pointwise("Mul", rest, b),
            emit.scalar(0, out.dtype),
            dtype=torch.bool,
        )
        whole = emit.pointwise("Div", emit.pointwise("Sub", a, rest), b)
        if not out.dtype.is_floating_point:
            return emit.pointwise("Sub", whole, emit.cast(below, out.dtype))
        found = emit.pointwise("Sub", emit.pointwise("Round", whole), emit.cast(below, out.dtype))
        none = emit.pointwise("Equal", b, emit.scalar(0, out.dtype), dtype=torch.bool)
        return emit.pointwise("Where", none, result, found, dtype=out.dtype)
    if rounding_mode is None or not out.dtype.is_floating_point:
        return result
    return emit.pointwise(
        "Mul",
        emit.pointwise("Sign", result),
        emit.pointwise("Floor", emit.pointwise("Abs", result)),
    )


def _pow(emit: Emitter, out: Spec, x: Any, exponent: Any) -> Value:
    x = operand(emit, x, out.dtype)
    if exponent == 2:
        return emit.pointwise("Mul", x, x)
    if exponent == 3:
        return emit.pointwise("Mul", emit.pointwise("Mul", x, x), x)
    return (
        emit.pointwise("Sqrt", x)
        if exponent == 0.5
        else emit.pointwise("Pow", x, operand(emit, exponent, out.dtype))
    )


def _rsqrt(emit: Emitter, out: Spec, x: Value) -> Value:
    return emit.pointwise("Reciprocal", emit.pointwise("Sqrt", emit.cast(x, out.dtype)))


def _log1p(emit: Emitter, out: Spec, x: Value) -> Value:
    """``x * log(u) / (u - 1)`` with ``u = 1 + x``: what the sum loses of a small x, the quotient
    gives back.
    """
    x = emit.cast(x, out.dtype)
    one = emit.scalar(1, out.dtype)
    whole = emit.pointwise("Add", x, one)
    kept = emit.pointwise("Sub", whole, one)
    log = emit.pointwise("Log", whole)
    exact = emit.pointwise(
        "Equal", kept, x, dtype=torch.bool
    )  # infinity too, of which there is no quotient
    large = replace(
        emit.pointwise(
            "Where", exact, log, emit.pointwise("Div", emit.pointwise("Mul", x, log), kept)
        ),
        dtype=out.dtype,
    )
    nothing = emit.pointwise("Equal", kept, emit.scalar(0, out.dtype), dtype=torch.bool)
    return replace(emit.pointwise("Where", nothing, x, large), dtype=out.dtype)


def _expm1(emit: Emitter, out: Spec, x: Value) -> Value:
    """``tanh(x / 2) * (exp(x) + 1)``, which loses nothing of a small x."""
    x = emit.cast(x, out.dtype)
    more = emit.pointwise("Add", emit.pointwise("Exp", x), emit.scalar(1, out.dtype))
    return emit.pointwise("Mul", emit.pointwise("Tanh", multiply(emit, x, 0.5)), more)


def _softplus(
    emit: Emitter, out: Spec, x: Value, beta: float = 1.0, threshold: float = 20.0
) -> Value:
    """``relu(x) + log1p(z)`` with ``z = exp(-|x|)``, whose sum with 1 is put right by ``(z - (u -
    1)) / u``.
    """
    bent = multiply(emit, x, beta)
    one = emit.scalar(1, out.dtype)
    rest = emit.pointwise("Exp", emit.pointwise("Neg", emit.pointwise("Abs", bent)))
    whole = emit.pointwise("Add", rest, one)
    lost = emit.pointwise(
        "Div", emit.pointwise("Sub", rest, emit.pointwise("Sub", whole, one)), whole
    )
    log = emit.pointwise("Add", emit.pointwise("Log", whole), lost)
    soft = multiply(emit, emit.pointwise("Add", emit.pointwise("Relu", bent), log), 1 / beta)
    if threshold >= _LINEAR:
        return soft
    above = emit.pointwise(
        "Greater",
        multiply(emit, x, beta),
        emit.scalar(threshold, out.dtype),
        dtype=torch.bool,
    )
    return _where(emit, out, above, x, soft)


def _clamp(emit: Emitter, out: Spec, x: Value, low: Any = None, high: Any = None) -> Value:
    x = emit.cast(x, out.dtype)
    if low is not None:
        x = emit.pointwise("Max", x, operand(emit, low, out.dtype))
    return x if high is None else emit.pointwise("Min", x, operand(emit, high, out.dtype))


def _where(emit: Emitter, out: Spec, condition: Value, a: Any, b: Any) -> Value:
    choice = emit.pointwise(
        "Where", condition, operand(emit, a, out.dtype), operand(emit, b, out.dtype)
    )
    return replace(choice, dtype=out.dtype)


def _threshold_backward(
    emit: Emitter, _out: Spec, grad: Value, x: Value, threshold: float
) -> Value:
    if threshold != 0:
        x = emit.pointwise("Sub", x, emit.scalar(threshold, x.dtype))
    return emit.pointwise("Mul", grad, step(emit, x))


def _tanh_backward(emit: Emitter, _out: Spec, grad: Value, y: Value) -> Value:
    return emit.pointwise(
        "Mul", grad, emit.pointwise("Sub", emit.scalar(1, y.dtype), emit.pointwise("Mul", y, y))
    )


def _sigmoid_backward(emit: Emitter, _out: Spec, grad: Value, y: Value) -> Value:
    return emit.pointwise(
        "Mul", grad, emit.pointwise("Mul", y, emit.pointwise("Sub", emit.scalar(1, y.dtype), y))
    )


def _normal_share(emit: Emitter, x: Value) -> tuple[Value, Value]:
    """``s = x / sqrt 2`` and the normal distribution of ``x``; shared by gelu and its gradient."""
    scaled = multiply(emit, x, math.sqrt(0.5))
    # (1 + erf) / 2 in one pass: the error function never leaves the range that HardSigmoid would
    # cut.
    return scaled, emit.pointwise("HardSigmoid", emit.pointwise("Erf", scaled), alpha=0.5, beta=0.5)


def _gelu(emit: Emitter, _out: Spec, x: Value, *, approximate: str = "none") -> Value:
    only_exact(approximate)
    return emit.pointwise("Mul", x, _normal_share(emit, x)[1])


def _gelu_backward(
    emit: Emitter, _out: Spec, grad: Value, x: Value, *, approximate: str = "none"
) -> Value:
    """``share + x * density``, the second term as ``s * exp(-s^2 - log(pi) / 2)``."""
    only_exact(approximate)
    scaled, share = _normal_share(emit, x)
    exponent = emit.pointwise(
        "Sub",
        emit.scalar(-0.5 * math.log(math.pi), x.dtype),
        emit.pointwise("Mul", scaled, scaled),
    )
    density = emit.pointwise("Mul", scaled, emit.pointwise("Exp", exponent))
    return emit.pointwise("Mul", grad, emit.pointwise("Add", share, density))


def only_exact(approximate: str) -> None:
    """Refuse the approximation by tanh, which is rewritten before."""
    if approximate != "none":
        raise ExportError(
            f"gelu(approximate={approximate!r}) cannot be exported; use the exact one"
        )


def _elu(
    emit: Emitter,
    out: Spec,
    x: Value,
    alpha: float = 1.0,
    scale: float = 1.0,
    input_scale: float = 1.0,
) -> Value:
    """``scale * (max(x, 0) + alpha * (exp(min(x, 0) * input_scale) - 1))``, without a choice per
    element.
    """
    raised = emit.pointwise(
        "Exp", multiply(emit, emit.pointwise("Min", x, emit.scalar(0, out.dtype)), input_scale)
    )
    low = emit.pointwise("Sub", raised, emit.scalar(1, out.dtype))
    return multiply(
        emit, emit.pointwise("Add", emit.pointwise("Relu", x), multiply(emit, low, alpha)), scale
    )


def _filled(value: float) -> Callable[..., Value]:
    def lower(emit: Emitter, out: Spec, *_: object, **__: object) -> Value:
        return fill(emit, out, value)

    return lower


def fill(emit: Emitter, out: Spec, value: float) -> Value:
    """A tensor of one number, kept as a scalar until a consumer needs it whole."""
    ones = (1,) * len(out.shape)
    name = emit.graph.constant(np.full(ones, value, numpy_dtype(out.dtype)))
    return Value(name, out.shape, out.dtype, ones, tuple(range(len(ones))))


def _full(emit: Emitter, out: Spec, _size: Any, value: Any, **_: object) -> Value:
    if isinstance(value, Value):
        return replace(
            fill(emit, out, 0),
            name=emit.view(emit.cast(value, out.dtype), (1,) * len(out.shape)).name,
        )
    return fill(emit, out, value)


def _arange(emit: Emitter, out: Spec, *bounds: Any, **_: object) -> Value:
    start, end, step_size = {1: (0, *bounds, 1), 2: (*bounds, 1), 3: bounds}[len(bounds)]
    if all(isinstance(b, (int, float)) for b in (start, end, step_size)):
        values = np.arange(start, end, step_size, dtype=numpy_dtype(out.dtype))
        return emit.value(emit.graph.constant(values), values.shape, out.dtype)
    names = [operand(emit, b, torch.int64).name for b in (start, end, step_size)]
    return emit.cast(
        emit.value(emit.graph.node("Range", *names), out.shape, torch.int64), out.dtype
    )


def _converted(emit: Emitter, out: Spec, value: Any, **_: object) -> Value:
    return operand(emit, value, out.dtype)


def _same(_emit: Emitter, _out: Spec, x: Value, *_: object, **__: object) -> Value:
    return x


_WITH_NUMBERS: dict[str, Callable[..., Value]] = {
    "add": _scaled("Add"),
    "sub": _scaled("Sub"),
    "rsub": lambda emit, out, a, b, alpha=1: _scaled("Sub")(emit, out, b, a, alpha=alpha),
    "mul": _binary("Mul"),
    "div": _div,
    "fmod": lambda emit, out, a, b: emit.pointwise(
        "Mod", operand(emit, a, out.dtype), operand(emit, b, out.dtype), fmod=1
    ),
    "masked_fill": lambda emit, out, x, mask, value: _where(emit, out, mask, value, x),
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
    aten.clamp_max.default: lambda emit, out, x, high: _clamp(emit, out, x, None, high),
    aten.where.self: _where,
    aten.threshold_backward.default: _threshold_backward,
    aten.tanh_backward.default: _tanh_backward,
    aten.sigmoid_backward.default: _sigmoid_backward,
    aten.elu.default: _elu,
    aten.hardtanh.default: lambda emit, out, x, low=-1.0, high=1.0: _clamp(emit, out, x, low, high),
    aten.leaky_relu.default: lambda emit, _, x, slope=0.01: emit.pointwise(
        "LeakyRelu", x, alpha=float(slope)
    ),
    aten.gelu.default: _gelu,
    aten.gelu_backward.default: _gelu_backward,
    aten.full.default: _full,
    aten.full_like.default: lambda emit, out, x, value, **_: _full(emit, out, x, value),
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    aten.scalar_tensor.default: _converted,
    overload("_to_copy"): _converted,
    aten.isnan.default: lambda emit, out, x: _compare("Equal", negate=True)(emit, out, x, x),
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
