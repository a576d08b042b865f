"""Lowerings to ONNX operators that have a gradient, for runtimes that differentiate the graph themselves."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from fleet_protocol.errors import ExportError
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.rules.elementwise import multiply, only_exact
from trainer_export.lowering.values import Spec, Value
from trainer_export.lowering.windows import Convolution, Window, mean_window, spread

aten = torch.ops.aten


def _convolution(e: Emitter, out: Spec, x: Value, weight: Value, bias: Value | None, *settings: Any) -> Value:
    convolution = Convolution(*settings)
    if convolution.transposed:
        raise ExportError("a transposed convolution cannot be exported; use Upsample followed by a convolution")
    rank = x.rank - 2
    inputs = [e.plain(value) for value in (x, weight, bias) if value is not None]
    name = e.graph.node(
        "Conv",
        *inputs,
        kernel_shape=list(weight.shape[2:]),
        strides=spread(convolution.stride, rank),
        pads=spread(convolution.padding, rank) * 2,
        dilations=spread(convolution.dilation, rank),
        group=convolution.groups,
    )
    return e.value(name, out.shape)


def _max_pool(e: Emitter, out: Sequence[Spec], x: Value, *settings: Any) -> tuple[Value, None]:
    window = Window(*settings)
    name = e.graph.node("MaxPool", e.plain(x), **window.attributes, dilations=spread(window.dilation, 2))
    return e.value(name, out[0].shape), None


def _average_pool(e: Emitter, out: Spec, x: Value, *settings: Any) -> Value:
    window, with_pads = mean_window(*settings)
    name = e.graph.node("AveragePool", e.plain(x), **window.attributes, count_include_pad=int(with_pads))
    return e.value(name, out.shape)


def _gelu(e: Emitter, _out: Spec, x: Value, *, approximate: str = "none") -> Value:
    only_exact(approximate)
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
