"""Lowerings to operators for which onnxruntime-training has a gradient."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from fleet_protocol.errors import ExportError
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.rules.activation import only_exact
from trainer_export.lowering.rules.elementwise import multiply
from trainer_export.lowering.table import LOWERINGS
from trainer_export.lowering.values import Spec, Value
from trainer_export.lowering.windows import Convolution, Window, mean_window, spread

aten = torch.ops.aten


def _convolution(
    emit: Emitter,
    out: Spec,
    x: Value,
    weight: Value,
    bias: Value | None,
    *settings: Any,
) -> Value:
    convolution = Convolution(*settings)
    if convolution.transposed:
        raise ExportError(
            "a transposed convolution cannot be exported; use Upsample followed by a convolution"
        )
    rank = x.rank - 2
    inputs: list[str] = []
    for value in (x, weight, bias):
        if value is not None:
            inputs.append(emit.in_logical_order(value))
    name = emit.node(
        "Conv",
        *inputs,
        kernel_shape=list(weight.shape[2:]),
        strides=spread(convolution.stride, rank),
        # ONNX lists the beginnings of all axes, then their ends; PyTorch pads both alike.
        pads=spread(convolution.padding, rank) * 2,
        dilations=spread(convolution.dilation, rank),
        group=convolution.groups,
    )
    return emit.value(name, out.shape)


def _max_pool(
    emit: Emitter,
    out: Sequence[Spec],
    x: Value,
    *settings: Any,
) -> tuple[Value, None]:
    window = Window(*settings)
    dilations = spread(window.dilation, 2)
    name = emit.node(
        "MaxPool",
        emit.in_logical_order(x),
        **window.attributes,
        dilations=dilations,
    )
    # The indices are only for PyTorch's gradient; the runtime has another.
    return emit.value(name, out[0].shape), None


def _average_pool(
    emit: Emitter,
    out: Spec,
    x: Value,
    *settings: Any,
) -> Value:
    window, with_pads = mean_window(*settings)
    counted = int(with_pads)
    name = emit.node(
        "AveragePool",
        emit.in_logical_order(x),
        **window.attributes,
        count_include_pad=counted,
    )
    return emit.value(name, out.shape)


def _gelu(
    emit: Emitter,
    _out: Spec,
    x: Value,
    *,
    approximate: str = "none",
) -> Value:
    # x * (erf(x / sqrt 2) + 1) / 2, in operators that the runtime differentiates.
    only_exact(approximate)
    error = emit.pointwise("Erf", multiply(emit, x, math.sqrt(0.5)))
    twice = emit.add(error, emit.scalar(1, x.dtype))
    return emit.mul(x, multiply(emit, twice, 0.5))


def _hard_sigmoid(emit: Emitter, out: Spec, x: Value) -> Value:
    # min(max(x + 3, 0), 6) / 6: the runtime has no gradient for HardSigmoid.
    shifted = emit.add(x, emit.scalar(3.0, x.dtype))
    bounded: Value = LOWERINGS[aten.clamp.default](emit, out, shifted, 0.0, 6.0)
    return multiply(emit, bounded, 1 / 6)


def _hard_swish(emit: Emitter, out: Spec, x: Value) -> Value:
    return emit.mul(x, _hard_sigmoid(emit, out, x))


RULES: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        **LOWERINGS,
        aten.convolution.default: _convolution,
        aten.gelu.default: _gelu,
        aten.hardsigmoid.default: _hard_sigmoid,
        aten.hardswish.default: _hard_swish,
        aten.max_pool2d_with_indices.default: _max_pool,
        aten.avg_pool2d.default: _average_pool,
    }
)
"""All lowerings; these replace the look-ups and stages of the portable format."""
