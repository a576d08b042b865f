"""Lowerings of look-ups in a table by one index, and of an embedding's gradient."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fleet_protocol.errors import ExportError
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.values import Spec, Value

aten = torch.ops.aten

_ONE_HOT_LIMIT = 128  # rows; for fewer, a one-hot product beats a serial scatter


@dataclass(frozen=True)
class _Table:
    """The settings of an embedding's gradient."""

    rows: int
    padding: int = -1
    scale: bool = False


def _embedding(emit: Emitter, out: Spec, weight: Value, indices: Value, *_: Any) -> Value:
    # A graph would count a negative index from the end; it refuses an index beyond the table.
    zero = emit.scalar(0, indices.dtype)
    low = emit.pointwise("Less", indices, zero, dtype=torch.bool)
    rows = emit.scalar(weight.shape[0], indices.dtype)
    indices = emit.pointwise("Where", low, rows, indices, dtype=indices.dtype)
    plain_weight = emit.in_logical_order(weight)
    plain_indices = emit.in_logical_order(indices)
    name = emit.node("Gather", plain_weight, plain_indices, axis=0)
    return emit.value(name, out.shape)


def _embedding_backward(
    emit: Emitter,
    out: Spec,
    grad: Value,
    indices: Value,
    *settings: Any,
) -> Value:
    # dW[r] is the sum of dy over the places that look up row r: onehot(indices)^T dy, as a product
    # for few rows and as a scatter for many.
    table = _Table(*settings)
    if table.scale:
        raise ExportError(
            "Embedding(scale_grad_by_freq=True) cannot be exported; use scale_grad_by_freq=False"
        )
    width = out.shape[-1]
    plain_grad = emit.in_logical_order(grad)
    updates = emit.reshaped(plain_grad, grad.shape, (-1, width))
    plain_indices = emit.in_logical_order(indices)
    column_sizes = emit.ints(-1, 1)
    flat = emit.node("Reshape", plain_indices, column_sizes)
    if table.rows <= _ONE_HOT_LIMIT:
        numbers = emit.constant(np.arange(table.rows, dtype=np.int64)[None])
        matches = emit.node("Equal", flat, numbers)
        hot = emit.node("Cast", matches, to=1)
        name = emit.node("Gemm", hot, updates, transA=1)
    else:
        zero = emit.scalar(0, grad.dtype)
        table_sizes = emit.ints(table.rows, width)
        zeros = emit.node("Expand", zero.name, table_sizes)
        wide_sizes = emit.ints(1, width)
        wide = emit.node("Expand", flat, wide_sizes)
        # ScatterND with addition runs in parallel without locks in onnxruntime (1.19 and 1.31
        # alike) and loses updates of repeated rows; ScatterElements is serial and right.
        name = emit.node("ScatterElements", zeros, wide, updates, axis=0, reduction="add")
    if table.padding >= 0:
        keep = np.ones((table.rows, 1), np.float32)
        keep[table.padding] = 0
        mask = emit.constant(keep)
        name = emit.node("Mul", name, mask)
    return emit.value(name, out.shape)


def _gather(emit: Emitter, out: Spec, x: Value, dim: int, index: Value, **_: object) -> Value:
    inputs = (emit.in_logical_order(x), emit.in_logical_order(index))
    name = emit.node("GatherElements", *inputs, axis=dim % x.rank)
    return emit.value(name, out.shape, x.dtype)


def _index_select(emit: Emitter, out: Spec, x: Value, dim: int, index: Value) -> Value:
    inputs = (emit.in_logical_order(x), emit.in_logical_order(index))
    name = emit.node("Gather", *inputs, axis=dim % x.rank)
    return emit.value(name, out.shape, x.dtype)


LOWERINGS: dict[Any, Callable[..., Any]] = {
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.gather.default: _gather,
    aten.index_select.default: _index_select,
}
