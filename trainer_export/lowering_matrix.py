"""Lowerings of matrix products. An operand that is a pending transpose is read as it lies (Gemm's own flags)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainer_export.emitter import Emitter
from trainer_export.lowering_math import multiply
from trainer_export.values import Spec, Value

__all__ = ["LOWERINGS", "matrix_product"]

aten = torch.ops.aten


def _matrix(e: Emitter, x: Value) -> tuple[str, int]:
    """Name of a matrix and whether it lies transposed."""
    x = e.full(x)
    return (e.plain(x), 0) if x.is_plain else (x.name, 1)


def matrix_product(
    e: Emitter, left: Value, right: Value, added: str = "", *, alpha: float = 1.0, beta: float = 1.0
) -> Value:
    """``alpha * left @ right + beta * added`` for two matrices; ``added`` is the name of what broadcasts to it."""
    (a, trans_a), (b, trans_b) = _matrix(e, left), _matrix(e, right)
    inputs = (a, b, added) if added else (a, b)
    name = e.graph.node("Gemm", *inputs, transA=trans_a, transB=trans_b, alpha=alpha, beta=beta)
    return e.value(name, (left.shape[0], right.shape[1]))


def _mm(e: Emitter, out: Spec, a: Value, b: Value) -> Value:
    del out
    return matrix_product(e, a, b)


def _addmm(e: Emitter, out: Spec, bias: Value, a: Value, b: Value, *, beta: float = 1, alpha: float = 1) -> Value:
    del out
    stored = e.arranged(bias, range(bias.rank)) if bias.stored == bias.shape else e.plain(bias)
    return matrix_product(e, a, b, stored, alpha=float(alpha), beta=float(beta))


def _bmm(e: Emitter, out: Spec, a: Value, b: Value) -> Value:
    names = [_batched(e, x) for x in (a, b)]
    return e.value(e.graph.node("MatMul", *names), out.shape)


def _batched(e: Emitter, x: Value) -> str:
    """An operand of a batched product.

    Where the last two axes lie swapped it is written as a tensor in the swapped order and a Transpose of the last two,
    which the runtime folds into the product.
    """
    x = e.full(x)
    last, before = x.rank - 1, x.rank - 2
    if x.is_plain or x.order.index(last) > x.order.index(before):
        return e.plain(x)
    swapped = e.arranged(x, (*range(before), last, before))
    return e.graph.node("Transpose", swapped, perm=[*range(before), last, before])


def _baddbmm(e: Emitter, out: Spec, added: Value, a: Value, b: Value, *, beta: float = 1, alpha: float = 1) -> Value:
    product = multiply(e, _bmm(e, out, a, b), float(alpha))
    return product if beta == 0 else e.pointwise("Add", product, multiply(e, added, float(beta)))


def _mv(e: Emitter, out: Spec, a: Value, vector: Value) -> Value:
    return e.value(e.graph.node("MatMul", e.plain(a), e.plain(vector)), out.shape)


LOWERINGS: dict[Any, Callable[..., Any]] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten.baddbmm.default: _baddbmm,
    aten.mv.default: _mv,
    aten.dot.default: _mv,
}
