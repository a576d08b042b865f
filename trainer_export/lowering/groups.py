"""Grouped convolutions and their gradients, computed separately for each group.

For every tap, rows of a group's channels are looked up, as `columns` does for all channels. A
batched matrix product, with the groups as its batch, multiplies them by the group's kernel. For
narrow groups, the runtime's Conv and ConvTranspose are faster, and compute forward pass and input
gradient (`group_costs`). `depthwise` handles groups of one channel.
"""

import math

import numpy as np
from numpy.typing import NDArray

from trainer_export.lowering import depthwise
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.geometry import Geometry
from trainer_export.lowering.group_costs import columns_ns, runtime_ns
from trainer_export.lowering.runtime_conv import (
    fits_conv_transpose,
    runtime_conv,
    runtime_conv_transpose,
)
from trainer_export.lowering.values import Spec, Value, channels_last


def narrow_of(emit: Emitter, out: Spec, x: Value, weight: Value, geometry: Geometry) -> Value:
    """Return a grouped convolution.

    Args:
        emit: writes the nodes.
        out: shape of the result, [batch, outputs, ...].
        x: [batch, inputs, ...].
        weight: [outputs, inputs / groups, ...].
        geometry: geometry of the convolution.
    """
    inputs = weight.shape[1]
    if inputs == 1:
        return depthwise.narrow_of(emit, out, x, weight, geometry)
    groups = x.shape[1] // inputs
    outputs = weight.shape[0] // groups
    by_columns = columns_ns(geometry, inputs, outputs, math.prod(geometry.outputs))
    if runtime_ns(geometry, inputs, outputs, transposed=False) < by_columns:
        return runtime_conv(emit, out, x, weight, geometry, groups)
    columns = _columns(emit, x, groups, geometry.table())
    kernels = _kernels(emit, weight, groups, (0, 3, 2, 1))
    product = emit.node("MatMul", columns, kernels)
    return _joined(emit, product, out, groups)


def wide_of(emit: Emitter, out: Spec, grad: Value, weight: Value, geometry: Geometry) -> Value:
    """Return the input gradient of a grouped convolution, or a transposed one.

    Args:
        emit: writes the nodes.
        out: shape of the result, [batch, inputs, ...].
        grad: [batch, outputs, ...].
        weight: [outputs, inputs / groups, ...].
        geometry: geometry of the convolution.
    """
    inputs = weight.shape[1]
    if inputs == 1:
        return depthwise.wide_of(emit, out, grad, weight, geometry)
    groups = out.shape[1] // inputs
    outputs = weight.shape[0] // groups
    by_columns = columns_ns(geometry, outputs, inputs, math.prod(geometry.inputs))
    # The runtime's operator cannot write every output size.
    by_runtime = math.inf
    if fits_conv_transpose(geometry):
        by_runtime = runtime_ns(geometry, inputs, outputs, transposed=True)
    if by_runtime < by_columns:
        return runtime_conv_transpose(emit, out, grad, weight, geometry, groups)
    columns = _columns(emit, grad, groups, geometry.reverse_table())
    kernels = _kernels(emit, weight, groups, (0, 3, 1, 2))
    product = emit.node("MatMul", columns, kernels)
    return _joined(emit, product, out, groups)


def weight_of(emit: Emitter, grad: Value, x: Value, weight: Value, geometry: Geometry) -> Value:
    """Return the gradient of a grouped kernel.

    Args:
        emit: writes the nodes.
        grad: [batch, outputs, ...], of the results.
        x: [batch, inputs, ...].
        weight: [outputs, inputs / groups, ...].
        geometry: geometry of the convolution.
    """
    inputs = weight.shape[1]
    if inputs == 1:
        return depthwise.weight_of(emit, grad, x, weight, geometry)
    groups = x.shape[1] // inputs
    outputs = weight.shape[0] // groups
    columns = _columns(emit, x, groups, geometry.table())
    split = _split(emit, grad, groups)
    # Channels before batch and space: the product reads them as rows.
    rows = emit.arranged(split, (1, 2, 0, *range(3, split.rank)))
    row_sizes = emit.ints(groups, outputs, -1)
    turned = emit.node("Reshape", rows, row_sizes)
    product = emit.node("MatMul", turned, columns)
    taps = geometry.taps
    tap_sizes = emit.ints(groups * outputs, taps, inputs)
    # The products have the taps before the inputs, a kernel has them after.
    by_tap = emit.node("Reshape", product, tap_sizes)
    gradient = emit.value(
        by_tap,
        (groups * outputs, inputs, taps),
        order=(0, 2, 1),
    )
    return emit.view(gradient, weight.shape)


def _split(emit: Emitter, x: Value, groups: int) -> Value:
    """Return a map with an axis for groups before the channels, without moving data."""
    whole = emit.full(x)
    shape = (whole.shape[0], groups, whole.shape[1] // groups, *whole.shape[2:])
    order: list[int] = []
    for axis in whole.order:
        if axis == 1:
            order += [1, 2]
        else:
            order.append(axis + 1 if axis > 1 else axis)
    lying = emit.value(whole.name, shape, whole.dtype, order)
    name = emit.reshaped(whole.name, whole.physical, lying.physical)
    # The same bytes: an axis is split where it lies.
    return emit.value(name, shape, whole.dtype, order)


def _columns(emit: Emitter, x: Value, groups: int, table: NDArray[np.int64]) -> str:
    """Return the rows of every group in a table, [groups, batch * places, taps * channels]."""
    channels = x.shape[1] // groups
    positions = math.prod(x.shape[2:])
    split = _split(emit, x, groups)
    name = emit.arranged(split, (1, 0, *range(3, split.rank), 2))
    row_sizes = emit.ints(-1, positions, channels)
    rows = emit.node("Reshape", name, row_sizes)
    # Places in their own order need no look-up.
    if not np.array_equal(table.reshape(-1), np.arange(positions)):
        # The number of positions in a table means a zero.
        if (table == positions).any():
            pads = emit.ints(0, 0, 0, 0, 1, 0)
            rows = emit.node("Pad", rows, pads)
        places = emit.constant(table.reshape(-1))
        rows = emit.node("Gather", rows, places, axis=1)
    sizes = emit.ints(groups, -1, table.shape[1] * channels)
    return emit.node("Reshape", rows, sizes)


def _kernels(emit: Emitter, weight: Value, groups: int, order: tuple[int, ...]) -> str:
    """Return the kernel of every group as a matrix.

    Args:
        emit: writes the nodes.
        weight: [outputs, inputs / groups, ...].
        groups: number of groups.
        order: order of groups (0), outputs (1), inputs (2) and taps (3); the last are the columns.
    """
    taps = math.prod(weight.shape[2:])
    shape = (groups, weight.shape[0] // groups, weight.shape[1], taps)
    kernel = emit.view(weight, shape)
    name = emit.arranged(kernel, order)
    physical = tuple(shape[axis] for axis in order)
    return emit.reshaped(
        name,
        physical,
        (groups, physical[1] * physical[2], physical[3]),
    )


def _joined(emit: Emitter, product: str, out: Spec, groups: int) -> Value:
    """Return results [groups, batch * places, channels] as a map, channels last."""
    channels = out.shape[1] // groups
    shape = (out.shape[0], groups, channels, *out.shape[2:])
    rank = len(shape)
    order = (1, 0, *range(3, rank), 2)
    # The product has the groups first, a map in the order channels last has the batch first.
    sizes = emit.ints(groups, -1, *out.shape[2:], channels)
    split = emit.value(emit.node("Reshape", product, sizes), shape, order=order)
    name = emit.arranged(split, (0, *range(3, rank), 1, 2))
    map_sizes = emit.ints(
        -1,
        *out.shape[2:],
        out.shape[1],
    )
    joined = emit.node("Reshape", name, map_sizes)
    return emit.value(joined, out.shape, order=channels_last(len(out.shape)))
