"""Lowering of a 1x1 convolution with its batch norm, and of their gradient.

Matrices are [channels, places]; with ``X`` less its means, ``S = X X^T`` and ``n`` places:

    var = rowsum(W S * W) / n,  r = 1 / sqrt(var + eps),  Y = (r w W) X + b
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer_export import pointwise_norms  # noqa: F401 - registers shoal::pointwise_norm
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.values import Spec, Value, planes


@dataclass(frozen=True)
class _NormFactors:
    """The values that both directions need; equal nodes are written once.

    Attributes:
        count: number of places, float32 [].
        centred: ``X``, [inputs, places].
        kernel: ``W``, [outputs, inputs].
        sums: ``W S``, [outputs, inputs].
        inverse: ``r``, [outputs, 1].
        scale: ``r w``, [outputs, 1].
        scaled: ``r w W``, [outputs, inputs].
    """

    count: Value
    centred: str
    kernel: Value
    sums: Value
    inverse: Value
    scale: Value
    scaled: Value


def _rows(emit: Emitter, x: Value) -> str:
    """Return a map as a matrix [channels, places]."""
    name = emit.arranged(x, planes(x.rank))
    sizes = emit.ints(x.shape[1], -1)
    return emit.node("Reshape", name, sizes)


def _row_sums(emit: Emitter, matrix: Value) -> Value:
    return emit.reduce("ReduceSum", matrix, [1], keep=True)


def _norm_factors(emit: Emitter, x: Value, weight: Value, scale: Value, eps: float) -> _NormFactors:
    x = emit.full(x)
    outputs, inputs = weight.shape[:2]
    rows = _rows(emit, x)
    last = emit.ints(1)
    mean = emit.node("ReduceMean", rows, last, keepdims=1)
    centred = emit.node("Sub", rows, mean)
    square = emit.value(
        emit.node(
            "Gemm",
            centred,
            centred,
            transB=1,
        ),
        (inputs, inputs),
    )
    kernel = emit.view(weight, (outputs, inputs))
    sums = emit.value(
        emit.node(
            "MatMul",
            emit.in_logical_order(kernel),
            square.name,
        ),
        (outputs, inputs),
    )
    count = emit.size_as_float(math.prod((x.shape[0], *x.shape[2:])))
    squares = _row_sums(emit, emit.mul(sums, kernel))
    variance = emit.div(squares, count)
    shifted = emit.add(variance, emit.scalar(eps, x.dtype))
    inverse = emit.pointwise("Reciprocal", emit.pointwise("Sqrt", shifted))
    factor = emit.mul(inverse, emit.view(scale, (outputs, 1)))
    return _NormFactors(count, centred, kernel, sums, inverse, factor, emit.mul(kernel, factor))


def _map(emit: Emitter, matrix: str, shape: Sequence[Any]) -> Value:
    """Return a matrix [channels, places] as a map in planes."""
    sizes = emit.ints(shape[1], -1, *shape[2:])
    name = emit.node("Reshape", matrix, sizes)
    return emit.value(name, shape, order=planes(len(shape)))


def _pointwise_norm(
    emit: Emitter, out: Spec, x: Value, weight: Value, scale: Value, shift: Value, eps: float
) -> Value:
    factors = _norm_factors(emit, x, weight, scale, eps)
    column = emit.view(shift, (weight.shape[0], 1))
    matrix = emit.node(
        "Gemm",
        emit.in_logical_order(factors.scaled),
        factors.centred,
        emit.in_logical_order(column),
    )
    return _map(emit, matrix, out.shape)


def _pointwise_norm_backward(
    emit: Emitter,
    out: Sequence[Spec | None],
    grad: Value,
    x: Value,
    weight: Value,
    scale: Value,
    eps: float,
) -> tuple[Value | None, ...]:
    # With G = dY X^T, q = rowsum(G * W) and t = q r^2 / n, all sums over places being in G and S:
    #     dW = r w (G - t W S),  dw = q r,  db = rowsum dY
    #     dX = (r w W)^T (dY - mean dY) - (r w W)^T (t W) X
    # X stands for itself less its means, whose gradient is of sum 0 over places by itself.
    factors = _norm_factors(emit, x, weight, scale, eps)
    outputs, inputs = weight.shape[:2]
    rows = _rows(emit, emit.full(grad))
    products = emit.node("Gemm", rows, factors.centred, transB=1)
    by_input = emit.value(products, (outputs, inputs))
    covariance = _row_sums(emit, emit.mul(by_input, factors.kernel))
    to_scale = emit.mul(covariance, factors.inverse)
    last = emit.ints(1)
    to_shift = emit.value(
        emit.node(
            "ReduceSum",
            rows,
            last,
            keepdims=1,
        ),
        (outputs, 1),
    )
    share = emit.div(emit.mul(to_scale, factors.inverse), factors.count)
    straight = emit.sub(by_input, emit.mul(factors.sums, share))
    to_weight = emit.mul(straight, factors.scale)
    below = out[0]
    # None where nothing below the convolution is trained.
    to_x = None
    if below is not None:
        slopes = _Slopes(rows, to_shift, share)
        to_x = _map(emit, _input_slopes(emit, factors, slopes), below.shape)
    return (
        to_x,
        emit.view(to_weight, weight.shape),
        emit.view(to_scale, scale.shape),
        emit.view(to_shift, scale.shape),
    )


@dataclass(frozen=True)
class _Slopes:
    """Gradients that the gradient of the input follows from.

    Attributes:
        rows: ``dY``, [outputs, places].
        to_shift: ``rowsum dY``, [outputs, 1].
        share: ``t``, [outputs, 1].
    """

    rows: str
    to_shift: Value
    share: Value


def _input_slopes(emit: Emitter, parts: _NormFactors, slopes: _Slopes) -> str:
    """Return ``dX``, [inputs, places]."""
    scaled = emit.in_logical_order(parts.scaled)
    mean = emit.div(slopes.to_shift, parts.count)
    offset = emit.node("Gemm", scaled, emit.in_logical_order(mean), transA=1)
    negated = emit.node("Neg", offset)
    direct = emit.node("Gemm", scaled, slopes.rows, negated, transA=1)
    shared = emit.mul(parts.kernel, slopes.share)
    mixing = emit.node("Gemm", scaled, emit.in_logical_order(shared), transA=1)
    return emit.node("Gemm", mixing, parts.centred, direct, alpha=-1.0)


LOWERINGS: dict[Any, Callable[..., Any]] = {
    torch.ops.shoal.pointwise_norm.default: _pointwise_norm,
    torch.ops.shoal.pointwise_norm_backward.default: _pointwise_norm_backward,
}
