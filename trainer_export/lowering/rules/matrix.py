"""Lowerings of matrix products.

An operand with a pending transpose is read in its physical order (Gemm's flags).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.rules.elementwise import multiply
from trainer_export.lowering.values import Spec, Value

aten = torch.ops.aten


def _matrix(emit: Emitter, x: Value) -> tuple[str, int]:
    """Return the name of a matrix and whether it is stored transposed."""
    x = emit.full(x)
    return (emit.in_logical_order(x), 0) if x.is_plain else (x.name, 1)


@dataclass(frozen=True)
class _Scales:
    """Factors of a product, ``alpha``, and of the added term, ``beta``."""

    beta: float = 1.0
    alpha: float = 1.0


def matrix_product(
    emit: Emitter,
    left: Value,
    right: Value,
    added: str = "",
    scales: _Scales = _Scales(),
) -> Value:
    """Return ``alpha * left @ right + beta * added`` for two matrices.

    ``added`` is the name of a value that broadcasts to the product.
    """
    # One Gemm. The gradients dA = dY B^T and dB = A^T dY are products of views in the trace, whose
    # transposes are pending and become flags here.
    a, a_transposed = _matrix(emit, left)
    b, b_transposed = _matrix(emit, right)
    inputs = (a, b, added) if added else (a, b)
    name = emit.node(
        "Gemm",
        *inputs,
        transA=a_transposed,
        transB=b_transposed,
        alpha=float(scales.alpha),
        beta=float(scales.beta),
    )
    return emit.value(name, (left.shape[0], right.shape[1]))


def _addmm(emit: Emitter, _out: Spec, bias: Value, a: Value, b: Value, **scales: float) -> Value:
    plain_bias = emit.in_logical_order(bias)
    return matrix_product(emit, a, b, plain_bias, _Scales(**scales))


def _bmm(emit: Emitter, out: Spec, a: Value, b: Value) -> Value:
    left = _batched(emit, a)
    right = _batched(emit, b)
    name = emit.node("MatMul", left, right)
    return emit.value(name, out.shape)


def _batched(emit: Emitter, x: Value) -> str:
    """Return an operand of a batched product.

    If the last two axes are stored swapped, it is written as a tensor in the swapped order and a
    Transpose, which the runtime folds into the product.
    """
    x = emit.full(x)
    last = x.rank - 1
    before = x.rank - 2
    if x.is_plain or x.order.index(last) > x.order.index(before):
        return emit.in_logical_order(x)
    swapped = emit.arranged(x, (*range(before), last, before))
    return emit.node("Transpose", swapped, perm=[*range(before), last, before])


def _baddbmm(emit: Emitter, out: Spec, added: Value, a: Value, b: Value, **scales: float) -> Value:
    factors = _Scales(**scales)
    unscaled = _bmm(emit, out, a, b)
    product = multiply(emit, unscaled, float(factors.alpha))
    if factors.beta == 0:  # the added term is ignored then, even if it is infinite
        return product
    scaled_added = multiply(emit, added, float(factors.beta))
    return emit.add(product, scaled_added)


def _mv(emit: Emitter, out: Spec, a: Value, vector: Value) -> Value:
    # As matrices: the runtime folds a Transpose into a MatMul, and then reads a vector wrongly.
    rows = a if a.rank > 1 else emit.view(a, (1, *a.shape))
    column = emit.view(vector, (*vector.shape, 1))
    product = matrix_product(emit, rows, column)
    return emit.view(product, out.shape)


LOWERINGS: dict[Any, Callable[..., Any]] = {
    aten.mm.default: lambda emit, _out, a, b: matrix_product(emit, a, b),
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten.baddbmm.default: _baddbmm,
    aten.mv.default: _mv,
    aten.dot.default: _mv,
}
