"""Lowering of convolutions and their gradients to look-ups and matrix products, channels-last.

The runtime's own Conv is fast on images and slow on the small, deep feature maps where a step
spends its time: 18 ms against 4.5 for 128 -> 256 channels at 7x7, batch 32, two cores, and its
weight gradient as a convolution takes 23. Channels-last, the columns of a convolution are whole
rows of channels, so one Gather with a constant table copies them in parallel, and forward, weight
gradient and input gradient are each one Gemm near the peak of the machine. Other strides, paddings,
dilations and numbers of spatial dimensions only change the table. Maps with few channels are stored
in planes instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from trainer_export.lowering import groups
from trainer_export.lowering.columns import (
    columns_of,
    is_by_strides,
    kernel_matrix,
    kernel_order,
    map_of,
    matrix_of,
)
from trainer_export.lowering.convolution_costs import cheaper_tiling
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.geometry import Geometry
from trainer_export.lowering.input_gradients import gradient_of_windows
from trainer_export.lowering.runtime_conv import runtime_conv
from trainer_export.lowering.values import Spec, Value, channels_last, planes, reorder
from trainer_export.lowering.windows import Convolution
from trainer_export.lowering.winograd import winograd_kernel_gradient

aten = torch.ops.aten

# Up to this many channels, outputs are stored in planes: runs along a plane are longer than runs
# along channels.
_FEW = 8


def convolved(
    emit: Emitter,
    out: Spec,
    x: Value,
    weight: Value,
    bias: Value | None,
    *settings: Any,
) -> Value:
    """Return ``columns(X) W^T + b``: im2col, and one product for all samples.

    Arguments after the result are those of ``aten.convolution``.
    """
    convolution = Convolution(*settings)
    if convolution.transposed:
        return _transposed(emit, out, x, weight, bias, convolution)
    geometry = convolution.geometry(x.shape[2:], weight, out.shape[2:])
    whole_x = emit.full(x)
    if convolution.groups > 1:
        result = groups.narrow_of(emit, out, whole_x, weight, geometry)
        return with_bias(emit, result, bias)
    if _is_planes_product(emit, whole_x, geometry):
        result = _pointwise_in_planes(emit, out, whole_x, weight)
        return with_bias(emit, result, bias)
    if is_by_strides(emit, whole_x, geometry):
        result = runtime_conv(emit, out, whole_x, weight, geometry)
        lying = emit.arranged(result, planes(result.rank))
        in_planes = emit.value(lying, out.shape, order=planes(result.rank))
        return with_bias(emit, in_planes, bias)
    order = kernel_order(emit, geometry, weight.shape[0])
    kernel = kernel_matrix(emit, weight, order)
    columns = columns_of(emit, whole_x, geometry, weight.shape[0])
    # Then the result lies in planes, as its columns do.
    if columns.transposed and out.shape[1] <= _FEW:
        return _planes_product(emit, out, kernel, columns.name, bias)
    inputs = [columns.name, kernel]
    if bias is not None:
        inputs.append(emit.in_logical_order(bias))
    # A Gemm transposes either operand at no cost.
    matrix = emit.node("Gemm", *inputs, transA=columns.transposed, transB=1)
    return map_of(emit, matrix, out)


def _is_planes_product(emit: Emitter, x: Value, geometry: Geometry) -> bool:
    """Return whether a 1x1 convolution keeps its input's storage in planes.

    Then nothing is transposed next to depthwise convolutions, which work in planes.
    """
    return emit.keeps_planes and geometry.is_pointwise and not x.lies(channels_last(x.rank))


def _plane_rows(emit: Emitter, x: Value) -> str:
    """Return a map as a matrix [channels, batch * positions]."""
    name = emit.arranged(x, planes(x.rank))
    row_sizes = emit.ints(x.shape[1], -1)
    return emit.node("Reshape", name, row_sizes)


def _pointwise_in_planes(
    emit: Emitter, out: Spec, x: Value, weight: Value, *, transposes: bool = False
) -> Value:
    """Return ``W X``, or ``W^T X``, of maps in planes."""
    kernel = emit.reshaped(emit.in_logical_order(weight), weight.shape, weight.shape[:2])
    rows = _plane_rows(emit, x)
    matrix = emit.node("Gemm", kernel, rows, transA=int(transposes))
    sizes = emit.ints(out.shape[1], -1, *out.shape[2:])
    name = emit.node("Reshape", matrix, sizes)
    return emit.value(name, out.shape, order=planes(len(out.shape)))


def _pointwise_gradient_in_planes(
    emit: Emitter, grad: Value, x: Value, shape: Sequence[int]
) -> Value:
    """Return ``dY X^T`` of maps in planes."""
    slopes = _plane_rows(emit, grad)
    rows = _plane_rows(emit, x)
    matrix = emit.node("Gemm", slopes, rows, transB=1)
    return emit.value(emit.reshaped(matrix, tuple(shape[:2]), tuple(shape)), shape)


def _planes_product(
    emit: Emitter,
    out: Spec,
    kernel: str,
    columns: str,
    bias: Value | None,
) -> Value:
    """Return the product of a kernel with transposed columns, whose result is in planes."""
    channels = out.shape[1]
    inputs = [kernel, columns]
    if bias is not None:
        column = emit.view(bias, (channels, 1))
        inputs.append(emit.in_logical_order(column))
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
    """Return a transposed convolution: the input gradient of a convolution with the same kernel."""
    # The result of a transposed convolution is the map that the windows read.
    geometry = convolution.geometry(out.shape[2:], weight, x.shape[2:])
    whole_x = emit.full(x)
    result = _input_gradient(emit, out, whole_x, weight, geometry, convolution.groups)
    return with_bias(emit, result, bias)


def with_bias(emit: Emitter, result: Value, bias: Value | None) -> Value:
    """Return the result of a convolution with its bias, if it has one."""
    if bias is None:
        return result
    # A bias has an axis for channels only.
    shift = emit.view(bias, (1, result.shape[1], *[1] * (result.rank - 2)))
    return emit.add(result, shift)


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
    # PyTorch passes the size of the bias first, and which gradients are wanted last.
    _bias_shape, *own_settings, mask = settings
    convolution = Convolution(*own_settings)
    grad = emit.full(grad)
    x = emit.full(x)
    # The map that the windows read, and the map with one place per window.
    windowed = x
    results = grad
    if convolution.transposed:
        windowed = grad
        results = x
    geometry = convolution.geometry(windowed.shape[2:], weight, results.shape[2:])
    grad_x = grad_weight = grad_bias = None
    if mask[0]:
        spec = out[0]
        assert spec is not None
        if convolution.transposed:
            forward = replace(convolution, transposed=False)
            # The gradient of a transposed convolution is the convolution itself.
            grad_x = convolved(emit, spec, grad, weight, None, *forward.settings)
        else:
            grad_x = _input_gradient(emit, spec, grad, weight, geometry, convolution.groups)
    if mask[1] and convolution.groups > 1:
        grad_weight = groups.weight_of(emit, results, windowed, weight, geometry)
    elif mask[1]:
        grad_weight = _weight_gradient(emit, results, windowed, weight.shape, geometry)
    if mask[2]:
        # Over samples and all places.
        grad_bias = emit.reduce("ReduceSum", grad, [0, *range(2, grad.rank)], keep=False)
    return grad_x, grad_weight, grad_bias


def _weight_gradient(
    emit: Emitter,
    grad: Value,
    x: Value,
    shape: Sequence[int],
    geometry: Geometry,
) -> Value:
    """Return ``dY^T columns(X)``; a Gemm transposes either operand at no cost.

    A step that may add in any order uses Winograd's algorithm where the convolution does.
    `matrix_products.convolution_backward` writes the same in operators of PyTorch.
    """
    if _is_planes_product(emit, x, geometry):
        return _pointwise_gradient_in_planes(emit, grad, x, shape)
    if emit.free_order and not emit.keeps_planes:
        tiling = cheaper_tiling(geometry, shape[1], shape[0])
        if tiling is not None:
            return winograd_kernel_gradient(emit, grad, x, tiling)
    columns = columns_of(emit, x, geometry, shape[0])
    in_planes = grad.lies(planes(grad.rank))
    # A map in planes is read as it lies, without a transpose.
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
    order = kernel_order(emit, geometry, shape[0])
    physical = reorder(shape, order)
    # -1 is the taps times the inputs.
    gradient = emit.reshaped(matrix, (shape[0], -1), physical)
    return emit.value(gradient, shape, order=order)


def _input_gradient(
    emit: Emitter,
    out: Spec,
    grad: Value,
    weight: Value,
    geometry: Geometry,
    group_count: int,
) -> Value:
    """Return ``dX``, the sum over taps of ``dY W`` at the outputs that read an input."""
    if group_count > 1:
        return groups.wide_of(emit, out, grad, weight, geometry)
    if _is_planes_product(emit, grad, geometry):
        return _pointwise_in_planes(emit, out, grad, weight, transposes=True)
    if geometry.is_pointwise:
        rows = matrix_of(emit, grad)
        kernel = kernel_matrix(emit, weight, channels_last(weight.rank))
        product = emit.node("Gemm", rows, kernel)
        return map_of(emit, product, out)
    return gradient_of_windows(emit, out, grad, weight, geometry)


LOWERINGS: dict[Any, Callable[..., Any]] = {
    aten.convolution_backward.default: _convolution_backward,
}
