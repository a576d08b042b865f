"""The columns of a convolution: the inputs of each output, copied by look-ups or by slices."""

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer_export.lowering.arrangement import identity
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.geometry import Geometry
from trainer_export.lowering.values import (
    BATCH_HINT,
    Spec,
    Value,
    channels_last,
    planes,
    reorder,
)

# Nanoseconds, measured on two cores of an x86-64 server; only their ratios matter.
# To copy a row by a look-up.
_ROW_NS = 3.7
# To copy a number of a row.
_FLOAT_NS = 0.06
# To convert a number of a map into planes.
_TRANSPOSE_NS = 0.25
# To copy a row of a plane by a slice.
_SLICE_ROW_NS = 6.0
# To copy a number of such a row.
_SLICE_FLOAT_NS = 0.2
# To sort a number of a map by its remainder modulo the stride; measured on 2026-11-30.
_PHASE_NS = 1.0


def rows_of(emit: Emitter, x: Value, *, zero_row: bool) -> str:
    """Return a feature map as [batch, positions, channels], with zeros as a last row if wanted."""
    positions = math.prod(x.shape[2:])
    channels = x.shape[1]
    name = emit.arranged(x, channels_last(x.rank))
    physical = (x.shape[0], *x.shape[2:], channels)
    rows = emit.reshaped(name, physical, (x.shape[0], positions, channels))
    if not zero_row:
        return rows
    # Zeros for positions outside; the table refers to this row by the number of positions.
    pads = emit.ints(0, 0, 0, 0, 1, 0)
    return emit.node("Pad", rows, pads)


def look_up(emit: Emitter, x: Value, table: NDArray[np.int64]) -> str:
    """Return the rows of ``x`` in a table, as a matrix [batch * len(table), taps * channels]."""
    columns = _looked_up(emit, x, table)
    matrix_sizes = emit.ints(-1, table.shape[1] * x.shape[1])
    return emit.node("Reshape", columns, matrix_sizes)


def _looked_up(emit: Emitter, x: Value, table: NDArray[np.int64]) -> str:
    """Return the rows of ``x`` in a table, [batch, places and taps of the table, channels]."""
    has_zeros = bool((table == math.prod(x.shape[2:])).any())
    rows = rows_of(emit, x, zero_row=has_zeros)
    places = emit.constant(table.reshape(-1))
    return emit.node("Gather", rows, places, axis=1)


def look_up_ns(rows: int, taps: int, channels: int) -> float:
    """Return the cost of copying ``rows * taps`` rows of channels, in nanoseconds."""
    return rows * taps * (_ROW_NS + _FLOAT_NS * channels)


@dataclass(frozen=True)
class Columns:
    """The inputs of each output: a matrix [batch * outputs, taps * channels].

    Or its transpose, if Gemm needs it.
    """

    name: str
    transposed: int


def columns_of(emit: Emitter, x: Value, geometry: Geometry, outputs: int) -> Columns:
    """Return the columns of a convolution in the cheapest way.

    Forward pass and weight gradient request equal nodes, which the graph contains once.

    Args:
        emit: the emitter.
        x: the map that the windows read.
        geometry: the convolution.
        outputs: output channels of the kernel.
    """
    if puts_channels_first(emit, geometry, outputs):
        return Columns(_channels_first(emit, x, geometry), 0)
    return _taps_first(emit, x, geometry)


def puts_channels_first(emit: Emitter, geometry: Geometry, outputs: int) -> bool:
    """Return whether columns have channels before taps, as kernels lie in memory.

    To transpose the columns of a batch is then cheaper than to transpose the kernel and its
    gradient. The order of additions changes.
    """
    if not emit.free_order or geometry.taps == 1:
        return False
    return BATCH_HINT * math.prod(geometry.outputs) < outputs


def kernel_order(emit: Emitter, geometry: Geometry, outputs: int) -> tuple[int, ...]:
    """Return the axes of a kernel in the order that matches its columns."""
    rank = 2 + len(geometry.kernel)
    if puts_channels_first(emit, geometry, outputs):
        return identity(rank)
    return channels_last(rank)


def _channels_first(emit: Emitter, x: Value, geometry: Geometry) -> str:
    gathered = _looked_up(emit, x, geometry.table())
    split = emit.node("Reshape", gathered, emit.ints(-1, geometry.taps, x.shape[1]))
    moved = emit.node("Transpose", split, perm=[0, 2, 1])
    return emit.node("Reshape", moved, emit.ints(-1, x.shape[1] * geometry.taps))


def _taps_first(emit: Emitter, x: Value, geometry: Geometry) -> Columns:
    channels = x.shape[1]
    if geometry.is_pointwise:
        matrix = matrix_of(emit, x)
        return Columns(matrix, 0)
    if geometry.is_patches:
        patches = _patches(emit, x, geometry)
        return Columns(patches, 0)
    unit_steps = all(step == 1 for step in geometry.stride)
    if unit_steps and _slices_ns(geometry, x) < look_up_ns(1, geometry.taps, channels):
        sliced = _sliced(emit, x, geometry)
        return Columns(sliced, 1)
    if is_by_strides(emit, x, geometry):
        sliced = _sliced_by_strides(emit, x, geometry)
        return Columns(sliced, 1)
    look_up_once = look_up_ns(math.prod(geometry.outputs), geometry.taps, channels)
    if _look_up_twice_ns(geometry, channels) < look_up_once:
        columns = _look_up_twice(emit, x, geometry)
        return Columns(columns, 0)
    columns = look_up(emit, x, geometry.table())
    return Columns(columns, 0)


def _slices_ns(geometry: Geometry, x: Value) -> float:
    """Return the cost per output of copying shifted planes, and of converting a map into planes."""
    # A row of a plane is copied as a whole.
    row = geometry.outputs[-1]
    # A map that lies in planes needs no conversion.
    transpose = _TRANSPOSE_NS * (not x.lies(planes(x.rank)))
    by_channel = geometry.taps * (_SLICE_ROW_NS / row + _SLICE_FLOAT_NS) + transpose
    return float(x.shape[1] * by_channel)


def is_by_strides(emit: Emitter, x: Value, geometry: Geometry) -> bool:
    """Return whether the columns are slices with a stride, from planes of a few channels.

    They are not split into pieces, so the forward pass must not need them: they would stay in
    memory until the gradient of the weights. Next to depthwise convolutions, the runtime's Conv is
    faster than they are, because its result need not lie with the channels last.
    """
    if not emit.keeps_planes or max(geometry.stride) == 1 or geometry.is_patches:
        return False
    channels: int = x.shape[1]
    sorted_ns = _PHASE_NS * channels * math.prod(geometry.stride)
    by_slices = _slices_ns(geometry, x) + sorted_ns
    return by_slices < look_up_ns(1, geometry.taps, channels)


def _look_up_twice_ns(geometry: Geometry, channels: int) -> float:
    """Return the cost per sample of joining first the taps of a kernel row and then its rows.

    Infinite if that is not possible.
    """
    if len(geometry.kernel) != 2 or 1 in geometry.kernel:
        return math.inf
    height, width = geometry.kernel
    # Rows of the padded map, which the second look-up selects from.
    rows = geometry.inputs[0] + 2 * geometry.padding[0]
    first = look_up_ns(rows * geometry.outputs[1], width, channels)
    return first + look_up_ns(math.prod(geometry.outputs), height, width * channels)


def _look_up_twice(emit: Emitter, x: Value, geometry: Geometry) -> str:
    """Return the columns by two look-ups, which copy fewer and longer rows if channels are few."""
    height, width = geometry.kernel
    outputs = geometry.outputs
    # First along the width, for every row of the padded map.
    sides = Geometry(
        geometry.inputs,
        (geometry.inputs[0] + 2 * geometry.padding[0], outputs[1]),
        (1, width),
        (1, geometry.stride[1]),
        geometry.padding,
        (1, geometry.dilation[1]),
    )
    flat = look_up(emit, x, sides.table())
    strip_sizes = emit.ints(
        -1,
        math.prod(sides.outputs),
        width * x.shape[1],
    )
    strips = emit.node("Reshape", flat, strip_sizes)
    # Then along the height: [output row, output column, tap].
    start = np.arange(outputs[0])[:, None, None] * geometry.stride[0]
    tap = np.arange(height)[None, None] * geometry.dilation[0]
    column = np.arange(outputs[1])[None, :, None]
    # A strip per row of the padded map and output column.
    table = (start + tap) * outputs[1] + column
    places = emit.constant(table.reshape(-1))
    columns = emit.node("Gather", strips, places, axis=1)
    matrix_sizes = emit.ints(-1, geometry.taps * x.shape[1])
    return emit.node("Reshape", columns, matrix_sizes)


def _sliced(emit: Emitter, x: Value, geometry: Geometry) -> str:
    """Return the transposed columns as shifted copies of the whole input.

    Few channels make short rows and long planes.
    """
    rank = x.rank
    plane = _padded_planes(emit, x, geometry)
    axes = emit.ints(*range(2, rank))
    shifted = []
    # In the order of the kernel's taps, which the weights' rows have, too.
    for tap in itertools.product(*map(range, geometry.kernel)):
        start = []
        for place, step in zip(tap, geometry.dilation, strict=True):
            start.append(place * step)
        stop = []
        for begin, size in zip(start, geometry.outputs, strict=True):
            stop.append(begin + size)
        bounds = (emit.ints(*start), emit.ints(*stop))
        shifted.append(emit.node("Slice", plane, *bounds, axes))
    joined = emit.node("Concat", *shifted, axis=0)
    matrix_sizes = emit.ints(geometry.taps * x.shape[1], -1)
    return emit.node("Reshape", joined, matrix_sizes)


def _patches(emit: Emitter, x: Value, geometry: Geometry) -> str:
    """Return the columns of windows that lie side by side: one transpose of rows of windows."""
    channels = x.shape[1]
    name = emit.arranged(x, channels_last(x.rank))
    split = []
    for size, width in zip(geometry.outputs, geometry.kernel, strict=True):
        split += [size, width]
    # The last taps and the channels lie together already.
    split[-1] *= channels
    sizes = emit.ints(-1, *split)
    windows = emit.node("Reshape", name, sizes)
    if len(split) > 2:
        outputs = range(1, len(split), 2)
        taps = range(2, len(split) + 1, 2)
        windows = emit.node("Transpose", windows, perm=[0, *outputs, *taps])
    matrix_sizes = emit.ints(-1, geometry.taps * channels)
    return emit.node("Reshape", windows, matrix_sizes)


def _padded_planes(emit: Emitter, x: Value, geometry: Geometry) -> str:
    """Return a map in planes, with the zeros that windows read around it."""
    plane = emit.arranged(x, planes(x.rank))
    if not any(geometry.padding):
        return plane
    pads = (0, 0, *geometry.padding)
    widths = emit.ints(*pads, *pads)
    return emit.node("Pad", plane, widths)


def _sliced_by_strides(emit: Emitter, x: Value, geometry: Geometry) -> str:
    """Return the transposed columns of a convolution with strides as slices of the whole input.

    The last axis is sorted by remainders first, so that all further slices copy whole rows.
    """
    plane = _padded_planes(emit, x, geometry)
    *_, step = geometry.stride
    *_, width = geometry.inputs
    ends = emit.ints(width + 2 * geometry.padding[-1])
    last = emit.ints(x.rank - 1)
    steps = emit.ints(step)
    by_remainder = []
    for remainder in range(step):
        starts = emit.ints(remainder)
        by_remainder.append(emit.node("Slice", plane, starts, ends, last, steps))
    axes = emit.ints(*range(2, x.rank))
    row_steps = emit.ints(*geometry.stride[:-1], 1)
    shifted = []
    # In the order of the kernel's taps, which the weights' rows have, too.
    for tap in itertools.product(*map(range, geometry.kernel)):
        start = []
        stop = []
        for axis, place in enumerate(tap[:-1]):
            begin = place * geometry.dilation[axis]
            start.append(begin)
            stop.append(begin + (geometry.outputs[axis] - 1) * geometry.stride[axis] + 1)
        begin, remainder = divmod(tap[-1] * geometry.dilation[-1], step)
        bounds = (
            emit.ints(*start, begin),
            emit.ints(*stop, begin + geometry.outputs[-1]),
        )
        source = by_remainder[remainder]
        shifted.append(emit.node("Slice", source, *bounds, axes, row_steps))
    joined = emit.node("Concat", *shifted, axis=0)
    matrix_sizes = emit.ints(geometry.taps * x.shape[1], -1)
    return emit.node("Reshape", joined, matrix_sizes)


def matrix_of(emit: Emitter, x: Value) -> str:
    """Return a feature map as a matrix [batch * positions, channels]."""
    rows = rows_of(emit, x, zero_row=False)
    matrix_sizes = emit.ints(-1, x.shape[1])
    return emit.node("Reshape", rows, matrix_sizes)


def kernel_matrix(emit: Emitter, weight: Value, order: tuple[int, ...]) -> str:
    """Return a kernel as a matrix, with the outputs as rows and the other axes in an order."""
    physical = reorder(weight.shape, order)
    rows = emit.arranged(weight, order)
    return emit.reshaped(rows, physical, (weight.shape[0], math.prod(physical[1:])))


def map_of(emit: Emitter, matrix: str, out: Spec) -> Value:
    """Return a matrix [batch * positions, channels] as the feature map of the result."""
    order = channels_last(len(out.shape))
    map_sizes = emit.ints(-1, *out.shape[2:], out.shape[1])
    name = emit.node("Reshape", matrix, map_sizes)
    return emit.value(name, out.shape, order=order)
