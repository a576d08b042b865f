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
from trainer_export.lowering.values import Shape, Spec, Value, channels_last, planes, reorder
from trainer_export.lowering.windows import Convolution

aten = torch.ops.aten

# Channels up to which an output lies in planes: runs along a plane are longer than those along its
# channels.
_FEW = 8
# Nanoseconds, measured on two cores of an x86-64 server; only their ratios matter.
_FLOP_NS = 0.005
_PRODUCT_NS = 0.2  # to write a product that is read once more
_SUM_NS = 0.1  # to add a number to a sum
_TRANSPOSED_NS = 15.0
_TRANSPOSED_FLOP_NS = 0.015


def _weight_matrix(emit: Emitter, weight: Value) -> str:
    """Return the kernel as [outputs, taps * inputs]."""
    order = channels_last(weight.rank)
    physical = reorder(weight.shape, order)
    matrix = (weight.shape[0], math.prod(physical[1:]))
    rows = emit.arranged(weight, order)
    return emit.reshaped(rows, physical, matrix)


def _dense(emit: Emitter, weight: Value, groups: int) -> Value:
    """Return a grouped kernel as a full one with zeros.

    Simple, and right for the few grouped layers that small models have.
    """
    if groups == 1:
        return weight
    kernel = emit.plain(weight)
    repeated = emit.node("Concat", *[kernel] * groups, axis=1)
    shape = _dense_shape(weight, groups)
    mask = _group_mask(emit, shape, groups)
    return emit.mul(emit.value(repeated, shape), mask)


def _dense_shape(weight: Value, groups: int) -> Shape:
    return (weight.shape[0], weight.shape[1] * groups, *weight.shape[2:])


def _group_mask(emit: Emitter, shape: Sequence[int], groups: int) -> Value:
    """Return ones where outputs and inputs are of one group, with spatial axes of size 1."""
    block = np.ones((shape[0] // groups, shape[1] // groups))
    mask = np.kron(np.eye(groups), block).astype(np.float32)
    wide = mask.reshape(*mask.shape, *([1] * (len(shape) - 2)))
    name = emit.constant(wide)
    return emit.value(name, wide.shape)


def _sparse_gradient(emit: Emitter, grad: Value, groups: int) -> Value:
    """Return the gradient of a grouped kernel from that of the full one.

    The transpose of `_dense`: what is of two groups counts for nothing, and what is left of the
    copies of the kernel is added.
    """
    if groups == 1:
        return grad
    outputs, inputs, *kernel = grad.shape
    mask = _group_mask(emit, grad.shape, groups)
    masked = emit.mul(grad, mask)
    by_group = emit.view(masked, (outputs, groups, inputs // groups, *kernel))
    return emit.reduce("ReduceSum", by_group, [1], keep=False)


def _convolution(
    emit: Emitter,
    out: Spec,
    x: Value,
    weight: Value,
    bias: Value | None,
    *settings: Any,
) -> Value:
    # Y = columns(X) W^T + b: im2col, and one product for all samples.
    convolution = Convolution(*settings)
    if convolution.transposed:
        return _transposed(emit, out, x, weight, bias, convolution)
    geometry = convolution.geometry(x.shape[2:], weight, out.shape[2:])
    dense = _dense(emit, weight, convolution.groups)
    kernel = _weight_matrix(emit, dense)
    whole_x = emit.full(x)
    columns = columns_of(emit, whole_x, geometry)
    if columns.transposed and out.shape[1] <= _FEW:
        return _planes_product(emit, out, kernel, columns.name, bias)
    inputs = [columns.name, kernel]
    if bias is not None:
        inputs.append(emit.plain(bias))
    matrix = emit.node("Gemm", *inputs, transA=columns.transposed, transB=1)
    return _feature_map(emit, matrix, out)


def _planes_product(
    emit: Emitter,
    out: Spec,
    kernel: str,
    columns: str,
    bias: Value | None,
) -> Value:
    """Return the product of a kernel with transposed columns, whose result lies in planes."""
    channels = out.shape[1]
    inputs = [kernel, columns]
    if bias is not None:
        column = emit.view(bias, (channels, 1))
        inputs.append(emit.plain(column))
    matrix = emit.node("Gemm", *inputs)
    sizes = emit.ints(channels, -1, *out.shape[2:])
    name = emit.node("Reshape", matrix, sizes)
    return emit.value(name, out.shape, order=planes(len(out.shape)))


def _transposed(
    emit: Emitter,
    out: Spec,
    x: Value,
    weight: Value,
    bias: Value | None,
    convolution: Convolution,
) -> Value:
    """Return a transposed convolution: the input's gradient of one with the same kernel."""
    geometry = convolution.geometry(out.shape[2:], weight, x.shape[2:])
    kernel = _dense(emit, weight, convolution.groups)
    whole_x = emit.full(x)
    result = _input_gradient(emit, out, whole_x, kernel, geometry)
    if bias is None:
        return result
    shift = emit.view(bias, (1, out.shape[1], *[1] * (x.rank - 2)))
    return emit.add(result, shift)


def _feature_map(emit: Emitter, matrix: str, out: Spec) -> Value:
    """Return a matrix [batch * positions, channels] as the feature map of the result."""
    order = channels_last(len(out.shape))
    map_sizes = emit.ints(-1, *out.shape[2:], out.shape[1])
    name = emit.node("Reshape", matrix, map_sizes)
    return emit.value(name, out.shape, order=order)


def _convolution_backward(
    emit: Emitter,
    out: Sequence[Spec | None],
    grad: Value,
    x: Value,
    weight: Value,
    *settings: Any,
) -> tuple[Value | None, ...]:
    # dX: see `_input_gradient`; dW = dY^T columns(X), with the columns of the forward pass, which
    # are the same node; db = sum of dY over samples and positions. A transposed convolution
    # exchanges X and dY: its forward pass is the dX of a convolution.
    _bias_shape, *own_settings, mask = settings
    convolution = Convolution(*own_settings)
    groups = convolution.groups
    grad = emit.full(grad)
    x = emit.full(x)
    wide, narrow = (grad, x) if convolution.transposed else (x, grad)
    geometry = convolution.geometry(wide.shape[2:], weight, narrow.shape[2:])
    grad_x = grad_weight = grad_bias = None
    if mask[0]:
        spec = out[0]
        assert spec is not None
        if convolution.transposed:
            forward = replace(convolution, transposed=False)
            grad_x = _convolution(emit, spec, grad, weight, None, *forward.settings)
        else:
            kernel = _dense(emit, weight, groups)
            grad_x = _input_gradient(emit, spec, grad, kernel, geometry)
    if mask[1]:
        shape = _dense_shape(weight, groups)
        dense = _weight_gradient(emit, narrow, wide, shape, geometry)
        grad_weight = _sparse_gradient(emit, dense, groups)
    if mask[2]:
        grad_bias = emit.reduce("ReduceSum", grad, [0, *range(2, grad.rank)], keep=False)
    return grad_x, grad_weight, grad_bias


def _weight_gradient(
    emit: Emitter,
    grad: Value,
    x: Value,
    shape: Sequence[int],
    geometry: Geometry,
) -> Value:
    """Return ``dY^T columns(X)``, read as both lie: a Gemm transposes either for nothing."""
    columns = columns_of(emit, x, geometry)
    in_planes = grad.lies(planes(grad.rank))
    if in_planes:
        name = emit.arranged(grad, planes(grad.rank))
        row_sizes = emit.ints(grad.shape[1], -1)
        rows = emit.node("Reshape", name, row_sizes)
    else:
        rows = matrix_of(emit, grad)
    matrix = emit.node(
        "Gemm",
        rows,
        columns.name,
        transA=int(not in_planes),
        transB=columns.transposed,
    )
    order = channels_last(len(shape))
    physical = reorder(shape, order)
    gradient = emit.reshaped(matrix, (shape[0], -1), physical)
    return emit.value(gradient, shape, order=order)


def _input_gradient(
    emit: Emitter,
    out: Spec,
    grad: Value,
    weight: Value,
    geometry: Geometry,
) -> Value:
    """Return ``dX``, the sum over taps of ``dY W`` at the outputs that read an input.

    It is written in the cheapest of three ways. Look up what each input contributed to and
    multiply; or multiply first and add up what belongs together; or leave it to the runtime. The
    first moves rows of output channels and multiplies for every input; the second moves rows of
    input channels and multiplies for every output; the third wins where channels are few.
    """
    if geometry.is_pointwise:
        rows = matrix_of(emit, grad)
        kernel = _weight_matrix(emit, weight)
        product = emit.node("Gemm", rows, kernel)
        return _feature_map(emit, product, out)
    table = geometry.reverse_table()
    results = math.prod(geometry.outputs)
    # The most outputs that read one input.
    reach = int((table < results).sum(1).max())
    look_up_cost, multiply_cost, runtime_cost = _costs(geometry, weight, reach)
    if runtime_cost <= min(look_up_cost, multiply_cost):
        return _runtime_gradient(emit, out, grad, weight, geometry)
    if look_up_cost <= multiply_cost:
        return _look_up_first(emit, out, grad, weight, table)
    return _multiply_first(emit, out, grad, weight, geometry)


def _costs(geometry: Geometry, weight: Value, reach: int) -> tuple[float, float, float]:
    """Return nanoseconds per sample of the three ways to write an input's gradient."""
    outputs, inputs = weight.shape[:2]
    places = math.prod(geometry.inputs)
    results = math.prod(geometry.outputs)
    taps = geometry.taps
    flops = 2 * taps * inputs * outputs
    look_up_first = places * (look_up_ns(1, taps, outputs) + flops * _FLOP_NS)
    products = results * (flops * _FLOP_NS + taps * inputs * _PRODUCT_NS)
    sums = places * (look_up_ns(1, reach, inputs) + reach * inputs * _SUM_NS)
    by_runtime = math.inf
    if _fits_conv_transpose(geometry):
        by_runtime = results * (_TRANSPOSED_NS + flops * _TRANSPOSED_FLOP_NS)
    return look_up_first, products + sums, by_runtime


def _fits_conv_transpose(geometry: Geometry) -> bool:
    """Return whether less than a stride is left over at the end of every dimension.

    ConvTranspose takes no larger padding of its output.
    """
    for axis, size in enumerate(geometry.inputs):
        span = geometry.dilation[axis] * (geometry.kernel[axis] - 1)
        last = size + 2 * geometry.padding[axis] - span - 1
        if last >= geometry.outputs[axis] * geometry.stride[axis]:
            return False
    return True


def _runtime_gradient(
    emit: Emitter,
    out: Spec,
    grad: Value,
    weight: Value,
    geometry: Geometry,
) -> Value:
    """Return the gradient by the runtime's own operator, faster where channels are few."""
    missing = []
    for axis, size in enumerate(geometry.inputs):
        steps = (geometry.outputs[axis] - 1) * geometry.stride[axis]
        span = geometry.dilation[axis] * (geometry.kernel[axis] - 1)
        missing.append(size - (steps - 2 * geometry.padding[axis] + span + 1))
    plain_grad = emit.plain(grad)
    plain_weight = emit.plain(weight)
    name = emit.node(
        "ConvTranspose",
        plain_grad,
        plain_weight,
        kernel_shape=list(geometry.kernel),
        strides=list(geometry.stride),
        pads=list(geometry.padding) * 2,
        dilations=list(geometry.dilation),
        output_padding=missing,
    )
    return emit.value(name, out.shape)


def _look_up_first(
    emit: Emitter,
    out: Spec,
    grad: Value,
    weight: Value,
    table: NDArray[np.int64],
) -> Value:
    """Return the gradient as a product with what each input contributed to."""
    outputs, inputs = weight.shape[:2]
    order = (*range(2, weight.rank), 0, 1)
    physical = reorder(weight.shape, order)
    matrix = (table.shape[1] * outputs, inputs)
    taps = emit.arranged(weight, order)
    kernel = emit.reshaped(taps, physical, matrix)
    columns = look_up(emit, grad, table)
    product = emit.node("Gemm", columns, kernel)
    return _feature_map(emit, product, out)


def _multiply_first(
    emit: Emitter,
    out: Spec,
    grad: Value,
    weight: Value,
    geometry: Geometry,
) -> Value:
    """Return the gradient as sums of the products of every output and tap."""
    inputs = weight.shape[1]
    matrix = matrix_of(emit, grad)
    kernel = _weight_matrix(emit, weight)
    products = emit.node("Gemm", matrix, kernel)
    count = math.prod(geometry.outputs) * geometry.taps
    row_sizes = emit.ints(-1, count, inputs)
    rows = emit.node("Reshape", products, row_sizes)
    contributions, reach = _contributions(emit, rows, geometry)
    input_sizes = emit.ints(-1, reach, inputs)
    by_input = emit.node("Reshape", contributions, input_sizes)
    axes = emit.ints(1)
    total = emit.node("ReduceSum", by_input, axes, keepdims=0)
    return _feature_map(emit, total, out)


def _contributions(emit: Emitter, rows: str, geometry: Geometry) -> tuple[str, int]:
    """Return for each input the products [output, tap] that it takes part in, and their number.

    Zeros fill up where an input has fewer than others.
    """
    table = geometry.reverse_table()
    results = math.prod(geometry.outputs)
    reach = int((table < results).sum(1).max())
    taps = geometry.taps
    zero = results * taps
    index = np.where(table < results, table * taps + np.arange(taps), zero)
    # Sorted, the row of zeros is behind the others, because it has the largest number.
    index = np.sort(index, axis=1)[:, :reach]
    if (index == zero).any():
        pads = emit.ints(0, 0, 0, 0, 1, 0)
        rows = emit.node("Pad", rows, pads)
    return emit.node("Gather", rows, emit.constant(index.reshape(-1)), axis=1), reach


LOWERINGS: dict[Any, Callable[..., Any]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}
