"""Lowerings to ONNX operators that have a gradient, for runtimes that differentiate the graph themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from fleet_protocol.errors import ExportError
from trainer_export.emitter import Emitter
from trainer_export.lowering_math import multiply
from trainer_export.values import Spec, Value

__all__ = ["LOWERINGS"]

aten = torch.ops.aten


def _pair(values: Sequence[int], rank: int) -> list[int]:
    return list(values) * rank if len(values) == 1 else list(values)


def _convolution(
    e: Emitter,
    out: Spec,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Value:
    del output_padding
    if transposed:
        raise ExportError("a transposed convolution cannot be exported; use Upsample followed by a convolution")
    rank = x.rank - 2
    inputs = [e.plain(value) for value in (x, weight, bias) if value is not None]
    name = e.graph.node(
        "Conv",
        *inputs,
        kernel_shape=list(weight.shape[2:]),
        strides=_pair(stride, rank),
        pads=_pair(padding, rank) * 2,
        dilations=_pair(dilation, rank),
        group=groups,
    )
    return e.value(name, out.shape)


def _max_pool(
    e: Emitter,
    out: Sequence[Spec],
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> tuple[Value, None]:
    size = _pair(kernel, 2)
    name = e.graph.node(
        "MaxPool",
        e.plain(x),
        kernel_shape=size,
        strides=_pair(stride, 2) or size,
        pads=_pair(padding, 2) * 2,
        dilations=_pair(dilation, 2),
        ceil_mode=int(ceil_mode),
    )
    return e.value(name, out[0].shape), None


def _average_pool(
    e: Emitter,
    out: Spec,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    if divisor_override is not None:
        raise ExportError("avg_pool2d(divisor_override=...) cannot be exported; multiply the result instead")
    size = _pair(kernel, 2)
    name = e.graph.node(
        "AveragePool",
        e.plain(x),
        kernel_shape=size,
        strides=_pair(stride, 2) or size,
        pads=_pair(padding, 2) * 2,
        ceil_mode=int(ceil_mode),
        count_include_pad=int(count_include_pad),
    )
    return e.value(name, out.shape)


def _gelu(e: Emitter, out: Spec, x: Value, *, approximate: str = "none") -> Value:
    del out
    if approximate != "none":
        raise ExportError(f"gelu(approximate={approximate!r}) cannot be exported; use the exact one")
    twice = e.pointwise("Add", e.pointwise("Erf", multiply(e, x, math.sqrt(0.5))), e.scalar(1, x.dtype))
    return e.pointwise("Mul", x, multiply(e, twice, 0.5))


LOWERINGS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        aten.convolution.default: _convolution,
        aten.gelu.default: _gelu,
        aten.max_pool2d_with_indices.default: _max_pool,
        aten.avg_pool2d.default: _average_pool,
    }
)
