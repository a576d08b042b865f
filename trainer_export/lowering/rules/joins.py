"""Lowerings that join tensors and split them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.rules.axes import unsqueeze
from trainer_export.lowering.values import Spec, Value, hint

aten = torch.ops.aten


def join(emit: Emitter, out: Spec, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Return tensors joined along a dimension."""
    # In the order of the largest, which is then copied once.
    values = []
    for tensor in tensors:
        # torch lets an empty vector be joined with anything.
        if len(tensor.shape) == 1 and not hint(tensor.shape):
            continue
        whole = emit.full(tensor)
        values.append(emit.cast(whole, out.dtype))
    dim %= len(out.shape)
    leader = max(values, key=lambda value: hint(value.shape))
    names = []
    for value in values:
        names.append(emit.arranged(value, leader.order))
    name = names[0]
    if len(names) > 1:
        name = emit.node("Concat", *names, axis=leader.order.index(dim))
    return emit.value(name, out.shape, out.dtype, leader.order)


def _stack(emit: Emitter, out: Spec, tensors: Sequence[Value], dim: int = 0) -> Value:
    dim %= len(out.shape)
    rows = []
    for tensor in tensors:
        rows.append(unsqueeze(emit, out, tensor, dim))
    return join(emit, out, rows, dim)


def _split(
    emit: Emitter,
    out: Sequence[Spec],
    x: Value,
    _sizes: Any,
    dim: int = 0,
) -> tuple[Value, ...]:
    x = emit.full(x)
    dim = dim % x.rank
    lengths = tuple(spec.shape[dim] for spec in out)
    length_tensor = emit.shape_tensor(lengths)
    names = emit.nodes(
        "Split",
        x.name,
        length_tensor,
        outputs=len(out),
        attributes={"axis": x.order.index(dim)},
    )
    pairs = zip(names, out, strict=True)
    values = []
    for name, spec in pairs:
        values.append(emit.value(name, spec.shape, x.dtype, x.order))
    return tuple(values)


LOWERINGS: dict[Any, Callable[..., Any]] = {
    aten.cat.default: join,
    aten.stack.default: _stack,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
}
