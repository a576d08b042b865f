"""Lowerings of tensors that do not depend on other values: filled ones, and ranges of numbers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.rules.elementwise import operand
from trainer_export.lowering.values import Spec, Value, numpy_dtype

aten = torch.ops.aten


def _filled(value: float) -> Callable[..., Value]:
    def lower(emit: Emitter, out: Spec, *_: object, **__: object) -> Value:
        return fill(emit, out, value)

    return lower


def fill(emit: Emitter, out: Spec, value: float) -> Value:
    """Return a tensor with one element, kept as a scalar until a consumer needs the full shape."""
    stored = (1,) * len(out.shape)
    name = emit.constant(np.full(stored, value, numpy_dtype(out.dtype)))
    return Value(
        name,
        out.shape,
        out.dtype,
        stored,
        tuple(range(len(stored))),
    )


def _full(emit: Emitter, out: Spec, _size: Any, value: Any, **_: object) -> Value:
    if not isinstance(value, Value):
        return fill(emit, out, value)
    pending = fill(emit, out, 0)
    converted = emit.cast(value, out.dtype)
    number = emit.view(converted, (1,) * len(out.shape))
    return replace(pending, name=number.name)


def _arange(emit: Emitter, out: Spec, *bounds: Any, **_: object) -> Value:
    start: Any = 0
    step_size: Any = 1
    if len(bounds) == 1:
        (end,) = bounds
    elif len(bounds) == 2:
        start, end = bounds
    else:
        start, end, step_size = bounds
    if all(isinstance(bound, (int, float)) for bound in (start, end, step_size)):
        values = np.arange(start, end, step_size, dtype=numpy_dtype(out.dtype))
        name = emit.constant(values)
        return emit.value(name, values.shape, out.dtype)
    names = []
    for bound in (start, end, step_size):
        names.append(operand(emit, bound, torch.int64).name)
    name = emit.node("Range", *names)
    numbers = emit.value(name, out.shape, torch.int64)
    return emit.cast(numbers, out.dtype)


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


LOWERINGS: dict[Any, Callable[..., Any]] = {
    aten.full.default: _full,
    aten.full_like.default: lambda emit, out, x, value, **_: _full(emit, out, x, value),
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
}
LOWERINGS |= {
    getattr(aten, name).default: _filled(value)
    for value, names in _FILLED.items()
    for name in names
}
