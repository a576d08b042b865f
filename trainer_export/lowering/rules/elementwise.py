"""Lowerings of arithmetic, comparisons and choices, element by element."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.values import Dim, Spec, Value, overload

aten = torch.ops.aten

# HardSigmoid is max(0, min(1, alpha * x + beta)): with the largest slope of a float it is the step
# function, in one vectorised pass. Greater + Cast takes eight times as long, Where fifty times
# (onnxruntime 1.19, 1.6 M elements).
_STEEPEST = 3e38

UNARY = """
Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Erf Exp Floor Log Neg Reciprocal Relu Round
Sigmoid Sign Sin Sinh Sqrt Tan Tanh
"""
"""Operators of ONNX that torch has under the same name."""


def operand(emit: Emitter, value: Value | complex | Dim, dtype: torch.dtype) -> Value:
    """Return a number, a size or a value as a value of an element type."""
    if isinstance(value, Value):
        return emit.cast(value, dtype)
    if isinstance(value, (int, float, bool)):
        return emit.scalar(value, dtype)
    count = emit.size_as_float(value)
    return emit.cast(count, dtype)


def step(emit: Emitter, value: Value) -> Value:
    """Return 1 where ``value`` is above 0, else 0, in its own type (float32)."""
    return emit.pointwise("HardSigmoid", value, alpha=_STEEPEST, beta=0.0)


def multiply(emit: Emitter, value: Value, factor: float) -> Value:
    """Return a value times a number; for 1 the value itself."""
    if factor == 1.0:
        return value
    scale = emit.scalar(factor, value.dtype)
    return emit.mul(value, scale)


def _unary(op_type: str) -> Callable[..., Value]:
    def lower(emit: Emitter, out: Spec, x: Value) -> Value:
        converted = emit.cast(x, out.dtype)
        return emit.pointwise(op_type, converted)

    return lower


def _binary(op_type: str) -> Callable[..., Value]:
    neutral = 1 if op_type in ("Mul", "Div") else None

    def lower(emit: Emitter, out: Spec, a: Any, b: Any) -> Value:
        if op_type == "Mul" and out.dtype == torch.bool:
            return emit.pointwise("And", a, b)
        if isinstance(b, (int, float)) and b == neutral:
            return operand(emit, a, out.dtype)
        left = operand(emit, a, out.dtype)
        right = operand(emit, b, out.dtype)
        return emit.pointwise(op_type, left, right)

    return lower


def _compare(op_type: str, *, negate: bool = False) -> Callable[..., Value]:
    def lower(emit: Emitter, out: Spec, a: Any, b: Any) -> Value:
        dtype = torch.result_type(_example(a), _example(b))
        left = operand(emit, a, dtype)
        right = operand(emit, b, dtype)
        result = emit.pointwise(op_type, left, right, dtype=out.dtype)
        return emit.pointwise("Not", result) if negate else result

    return lower


def _example(value: Any) -> Any:
    """Return the operands from which torch derives the common element type of a comparison."""
    if isinstance(value, Value):
        return torch.empty((1,) * value.rank, dtype=value.dtype)
    return value if isinstance(value, (int, float)) else 1


def _scaled(op_type: str) -> Callable[..., Value]:
    def lower(emit: Emitter, out: Spec, a: Any, b: Any, *, alpha: float = 1) -> Value:
        left = operand(emit, a, out.dtype)
        right = operand(emit, b, out.dtype)
        scaled = multiply(emit, right, alpha)
        return emit.pointwise(op_type, left, scaled)

    return lower


def _div(emit: Emitter, out: Spec, a: Any, b: Any, *, rounding_mode: str | None = None) -> Value:
    a = operand(emit, a, out.dtype)
    b = operand(emit, b, out.dtype)
    quotient = emit.div(a, b)
    if rounding_mode == "floor":
        return _floor_div(emit, out, a, b, quotient)
    if rounding_mode is None or not out.dtype.is_floating_point:
        return quotient
    # Towards 0: sign(q) * floor(|q|).
    sign = emit.pointwise("Sign", quotient)
    magnitude = emit.pointwise("Abs", quotient)
    whole = emit.pointwise("Floor", magnitude)
    return emit.mul(sign, whole)


def _floor_div(emit: Emitter, out: Spec, a: Value, b: Value, quotient: Value) -> Value:
    # round((a - r) / b) - [r * b < 0] with r = fmod(a, b), as in PyTorch: the quotient of 1 and
    # 0.1 is rounded up, and its floor would be 10, not 9.
    remainder = emit.pointwise("Mod", a, b, fmod=1)
    signs = emit.mul(remainder, b)
    zero = emit.scalar(0, out.dtype)
    below = emit.pointwise("Less", signs, zero, dtype=torch.bool)
    multiple = emit.sub(a, remainder)
    whole = emit.div(multiple, b)
    if not out.dtype.is_floating_point:
        correction = emit.cast(below, out.dtype)
        return emit.sub(whole, correction)
    rounded = emit.pointwise("Round", whole)
    correction = emit.cast(below, out.dtype)
    floor = emit.sub(rounded, correction)
    zero = emit.scalar(0, out.dtype)
    by_zero = emit.pointwise("Equal", b, zero, dtype=torch.bool)
    return emit.pointwise("Where", by_zero, quotient, floor, dtype=out.dtype)


def _pow(emit: Emitter, out: Spec, x: Any, exponent: Any) -> Value:
    # Squares, cubes and roots by operators that cost less than Pow.
    x = operand(emit, x, out.dtype)
    if exponent == 2:
        return emit.mul(x, x)
    if exponent == 3:
        square = emit.mul(x, x)
        return emit.mul(square, x)
    if exponent == 0.5:
        return emit.pointwise("Sqrt", x)
    power = operand(emit, exponent, out.dtype)
    return emit.pointwise("Pow", x, power)


def _rsqrt(emit: Emitter, out: Spec, x: Value) -> Value:
    converted = emit.cast(x, out.dtype)
    root = emit.pointwise("Sqrt", converted)
    return emit.pointwise("Reciprocal", root)


def _log1p(emit: Emitter, out: Spec, x: Value) -> Value:
    # x * log(u) / (u - 1) with u = 1 + x: what the sum loses of a small x, the quotient gives back.
    x = emit.cast(x, out.dtype)
    unit = emit.scalar(1, out.dtype)
    whole = emit.add(x, unit)
    kept = emit.sub(whole, unit)
    log = emit.pointwise("Log", whole)
    # If nothing is lost, and at infinity, where the quotient would be NaN.
    exact = emit.pointwise("Equal", kept, x, dtype=torch.bool)
    product = emit.mul(x, log)
    quotient = emit.div(product, kept)
    choice = emit.pointwise("Where", exact, log, quotient)
    large = replace(choice, dtype=out.dtype)
    # If everything is lost, log1p(x) is x.
    zero = emit.scalar(0, out.dtype)
    vanished = emit.pointwise("Equal", kept, zero, dtype=torch.bool)
    result = emit.pointwise("Where", vanished, x, large)
    return replace(result, dtype=out.dtype)


def _expm1(emit: Emitter, out: Spec, x: Value) -> Value:
    # tanh(x / 2) * (exp(x) + 1), which loses nothing of a small x.
    x = emit.cast(x, out.dtype)
    exponential = emit.pointwise("Exp", x)
    unit = emit.scalar(1, out.dtype)
    above = emit.add(exponential, unit)
    half = multiply(emit, x, 0.5)
    tangent = emit.pointwise("Tanh", half)
    return emit.mul(tangent, above)


def _clamp(emit: Emitter, out: Spec, x: Value, low: Any = None, high: Any = None) -> Value:
    x = emit.cast(x, out.dtype)
    if low is not None:
        lower_bound = operand(emit, low, out.dtype)
        x = emit.pointwise("Max", x, lower_bound)
    if high is not None:
        upper_bound = operand(emit, high, out.dtype)
        x = emit.pointwise("Min", x, upper_bound)
    return x


def where(emit: Emitter, out: Spec, condition: Value, a: Any, b: Any) -> Value:
    """Return ``a`` where a condition holds, else ``b``."""
    left = operand(emit, a, out.dtype)
    right = operand(emit, b, out.dtype)
    choice = emit.pointwise("Where", condition, left, right)
    return replace(choice, dtype=out.dtype)


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
        "Mod",
        operand(emit, a, out.dtype),
        operand(emit, b, out.dtype),
        fmod=1,
    ),
    "masked_fill": lambda emit, out, x, mask, value: where(emit, out, mask, value, x),
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
    aten.clamp.default: _clamp,
    aten.clamp.Tensor: _clamp,
    aten.clamp_min.default: _clamp,
    aten.clamp_max.default: lambda emit, out, x, high: _clamp(emit, out, x, None, high),
    aten.where.self: where,
    aten.hardtanh.default: lambda emit, out, x, low=-1.0, high=1.0: _clamp(emit, out, x, low, high),
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
