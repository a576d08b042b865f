"""Lowering of convolutions and their gradients to look-ups and matrix products, channels-last.

The runtime's own Conv is fast on images and slow on the small, deep feature maps where a step
spends its time: 18 ms against 4.5 for 128 -> 256 channels at 7x7, batch 32, two cores, and its
weight gradient as a convolution takes 23. Channels-last, the columns of a convolution are whole
rows of channels, so one Gather with a constant table copies them in parallel, and forward, weight
gradient and input gradient are each one Gemm near the peak of the machine. Any stride, padding,
dilation and number of spatial dimensions is only another table. Few channels lie in planes instead.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_export.lowering.columns import (
    Geometry,
    columns_of,
    look_up,
    look_up_ns,
    matrix_of,
)
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.values import Spec, Value, channels_last, planes
from trainer_export.lowering.windows import Convolution

aten = torch.ops.aten

# channels of an output that lies in planes: runs along a plane are longer than those along its
# channels
_FEW = 8
# Nanoseconds, measured on two cores of an x86-64 server; only their ratios matter.
_FLOP_NS = 0.005
_TRANSPOSED_NS = 15.0
_TRANSPOSED_FLOP_NS = 0.015


def _weight_matrix(e: Emitter, weight: Value) -> str:
    """The kernel as [outputs, taps * inputs]."""
    order = channels_last(weight.rank)
    physical = tuple(weight.shape[i] for i in order)
    return e.reshaped(
        e.arranged(weight, order), physical, (weight.shape[0], math.prod(physical[1:]))
    )


def _dense(e: Emitter, weight: Value, groups: int) -> Value:
    """A grouped kernel as a full one with zeros.

    Simple, and right for the few grouped layers small models have.
    """
    if groups == 1:
        return weight
    repeated = e.graph.node("Concat", *[e.plain(weight)] * groups, axis=1)
    shape = (weight.shape[0], weight.shape[1] * groups, *weight.shape[2:])
    return e.pointwise("Mul", e.value(repeated, shape), _group_mask(e, shape, groups))


def _group_mask(e: Emitter, shape: Sequence[int], groups: int) -> Value:
    mask = np.kron(np.eye(groups), np.ones((shape[0] // groups, shape[1] // groups))).astype(
        np.float32
    )
    wide = mask.reshape(*mask.shape, *([1] * (len(shape) - 2)))
    return e.value(e.graph.constant(wide), wide.shape)


def _sparse_gradient(e: Emitter, grad: Value, groups: int) -> Value:
    """The gradient of a grouped kernel from that of the full one."""
    if groups == 1:
        return grad
    outputs, inputs, *kernel = grad.shape
    masked = e.pointwise("Mul", grad, _group_mask(e, grad.shape, groups))
    return e.reduce(
        "ReduceSum",
        e.view(masked, (outputs, groups, inputs // groups, *kernel)),
        [1],
        keep=False,
    )


def _convolution(
    e: Emitter, out: Spec, x: Value, weight: Value, bias: Value | None, *settings: Any
) -> Value:
    convolution = Convolution(*settings)
    if convolution.transposed:
        return _backward_convolution(e, out, x, weight, bias, convolution)
    geometry = convolution.geometry(x.shape[2:], weight, out.shape[2:])
    kernel = _weight_matrix(e, _dense(e, weight, convolution.groups))
    columns = columns_of(e, e.full(x), geometry)
    if columns.transposed and out.shape[1] <= _FEW:
        inputs = [
            kernel,
            columns.name,
            *([e.plain(e.view(bias, (out.shape[1], 1)))] if bias is not None else []),
        ]
        flat = e.graph.node(
            "Reshape",
            e.graph.node("Gemm", *inputs),
            e.graph.ints(out.shape[1], -1, *out.shape[2:]),
        )
        return e.value(flat, out.shape, order=planes(x.rank))
    inputs = [columns.name, kernel, *([e.plain(bias)] if bias is not None else [])]
    flat = e.graph.node("Gemm", *inputs, transA=columns.transposed, transB=1)
    return _feature_map(e, flat, out)


def _backward_convolution(
    e: Emitter,
    out: Spec,
    x: Value,
    weight: Value,
    bias: Value | None,
    convolution: Convolution,
) -> Value:
    """A transposed convolution is the gradient of the input of a convolution with the same kernel."""
    geometry = convolution.geometry(out.shape[2:], weight, x.shape[2:])
    made = _input_gradient(e, out, e.full(x), _dense(e, weight, convolution.groups), geometry)
    return (
        made
        if bias is None
        else e.pointwise("Add", made, e.view(bias, (1, out.shape[1], *[1] * (x.rank - 2))))
    )


def _feature_map(e: Emitter, matrix: str, out: Spec) -> Value:
    """A matrix [batch * positions, channels] as the feature map of the given logical shape."""
    order = channels_last(len(out.shape))
    name = e.graph.node("Reshape", matrix, e.graph.ints(-1, *out.shape[2:], out.shape[1]))
    return e.value(name, out.shape, order=order)


def _convolution_backward(
    e: Emitter,
    out: Sequence[Spec | None],
    grad: Value,
    x: Value,
    weight: Value,
    *rest: Any,
) -> tuple[Value | None, ...]:
    _, *settings, mask = rest  # the first is the shape of the bias
    convolution = Convolution(*settings)
    groups = convolution.groups
    grad = e.full(grad)
    x = e.full(x)
    wide, narrow = (grad, x) if convolution.transposed else (x, grad)
    geometry = convolution.geometry(wide.shape[2:], weight, narrow.shape[2:])
    grad_x = grad_weight = grad_bias = None
    if mask[0]:
        spec = out[0]
        assert spec is not None
        if convolution.transposed:
            grad_x = _convolution(
                e,
                spec,
                grad,
                weight,
                None,
                *replace(convolution, transposed=False).settings,
            )
        else:
            grad_x = _input_gradient(e, spec, grad, _dense(e, weight, groups), geometry)
    if mask[1]:
        shape = (weight.shape[0], weight.shape[1] * groups, *weight.shape[2:])
        grad_weight = _sparse_gradient(
            e, _weight_gradient(e, narrow, wide, shape, geometry), groups
        )
    if mask[2]:
        grad_bias = e.reduce("ReduceSum", grad, [0, *range(2, grad.rank)], keep=False)
    return grad_x, grad_weight, grad_bias


def _weight_gradient(
    e: Emitter, grad: Value, x: Value, shape: Sequence[int], geometry: Geometry
) -> Value:
    columns = columns_of(e, x, geometry)
    if in_planes := grad.lies(planes(grad.rank)):
        rows = e.graph.node(
            "Reshape",
            e.arranged(grad, planes(grad.rank)),
            e.graph.ints(grad.shape[1], -1),
        )
    else:
        rows = matrix_of(e, grad)
    flat = e.graph.node(
        "Gemm", rows, columns.name, transA=int(not in_planes), transB=columns.transposed
    )
    order = channels_last(len(shape))
    return e.value(
        e.reshaped(flat, (shape[0], -1), tuple(shape[i] for i in order)),
        shape,
        order=order,
    )


def _input_gradient(e: Emitter, out: Spec, grad: Value, weight: Value, geometry: Geometry) -> Value:
    """The gradient of the input, in the cheapest of three ways.

    Look up what each input contributed to and multiply; or multiply first and add up what belongs
    together; or leave it to the runtime. The first moves rows of output channels and multiplies for
    every input; the second moves rows of input channels and multiplies for every output; the third
    wins where channels are few.
    """
    outputs, inputs = weight.shape[:2]
    table = geometry.reverse_table()
    if geometry.is_pointwise:
        return _feature_map(
            e, e.graph.node("Gemm", matrix_of(e, grad), _weight_matrix(e, weight)), out
        )
    places = math.prod(geometry.inputs)
    results = math.prod(geometry.outputs)
    taps = geometry.taps
    flops = 2 * taps * inputs * outputs
    reach = int((table < results).sum(1).max())
    first = places * (look_up_ns(1, taps, outputs) + flops * _FLOP_NS)
    second = results * (flops * _FLOP_NS + taps * inputs * 0.2) + places * (
        look_up_ns(1, reach, inputs) + reach * inputs * 0.1
    )
    g = geometry
    axes = range(len(geometry.kernel))
    ends = [g.inputs[i] + 2 * g.padding[i] - g.dilation[i] * (g.kernel[i] - 1) - 1 for i in axes]
    fits = all(
        ends[i] < g.outputs[i] * g.stride[i] for i in axes
    )  # else the padding at the end is a stride or more
    if fits and results * (_TRANSPOSED_NS + flops * _TRANSPOSED_FLOP_NS) <= min(first, second):
        return _transposed_convolution(e, out, grad, weight, geometry)
    if first <= second:
        order = (*range(2, weight.rank), 0, 1)
        physical = tuple(weight.shape[i] for i in order)
        kernel = e.reshaped(e.arranged(weight, order), physical, (taps * outputs, inputs))
        return _feature_map(e, e.graph.node("Gemm", look_up(e, grad, table), kernel), out)
    products = e.graph.node("Gemm", matrix_of(e, grad), _weight_matrix(e, weight))
    rows = e.graph.node("Reshape", products, e.graph.ints(-1, results * taps, inputs))
    gathered = _contributions(e, rows, table, results, reach)
    summed = e.graph.node(
        "ReduceSum",
        e.graph.node("Reshape", gathered, e.graph.ints(-1, reach, inputs)),
        e.graph.ints(1),
        keepdims=0,
    )
    return _feature_map(e, summed, out)


def _transposed_convolution(
    e: Emitter, out: Spec, grad: Value, weight: Value, geometry: Geometry
) -> Value:
    """The runtime's own operator, faster where channels are few."""
    g = geometry
    axes = range(len(geometry.kernel))
    reach = [
        (g.outputs[i] - 1) * g.stride[i] - 2 * g.padding[i] + g.dilation[i] * (g.kernel[i] - 1) + 1
        for i in axes
    ]
    name = e.graph.node(
        "ConvTranspose",
        e.plain(grad),
        e.plain(weight),
        kernel_shape=list(g.kernel),
        strides=list(g.stride),
        pads=list(g.padding) * 2,
        dilations=list(g.dilation),
        output_padding=[size - reached for size, reached in zip(g.inputs, reach, strict=True)],
    )
    return e.value(name, out.shape)


def _contributions(
    e: Emitter, rows: str, table: NDArray[np.int64], results: int, reach: int
) -> str:
    """For each input the ``reach`` products [output, tap] it takes part in, zeros where there are
    fewer.
    """
    taps = table.shape[1]
    zero = results * taps
    index = np.where(table < results, table * taps + np.arange(taps), zero)
    index = np.sort(index, axis=1)[:, :reach]  # the row of zeros has the largest number
    if (index == zero).any():
        rows = e.graph.node("Pad", rows, e.graph.ints(0, 0, 0, 0, 1, 0))
    return e.graph.node("Gather", rows, e.graph.constant(index.reshape(-1)), axis=1)


LOWERINGS: dict[Any, Callable[..., Any]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}
