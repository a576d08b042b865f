"""The columns of a convolution: what each output sees, copied by look-ups with constant tables or
by slices.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.values import Value, channels_last, planes

# Nanoseconds, measured on two cores of an x86-64 server; only their ratios matter.
_ROW_NS = 3.7
_FLOAT_NS = 0.06
_TRANSPOSE_NS = 0.25
_SLICE_ROW_NS = 6.0
_SLICE_FLOAT_NS = 0.2


@dataclass(frozen=True)
class Geometry:
    """The static shape of a convolution, with zeros before and after each spatial dimension."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def taps(self) -> int:
        """Number of weights per pair of channels."""
        return math.prod(self.kernel)

    @property
    def is_pointwise(self) -> bool:
        """Whether every output sees one input, at its own place."""
        return self.taps == 1 and self.inputs == self.outputs

    def table(self) -> NDArray[np.int64]:
        """For each output and tap the flat input position it reads, or the number of positions for
        a zero.
        """
        return self._positions(
            self.outputs,
            self.inputs,
            lambda axis, output, tap: (
                output * self.stride[axis] + tap * self.dilation[axis] - self.padding[axis],
                1,
            ),
        )

    def reverse_table(self) -> NDArray[np.int64]:
        """For each input and tap the flat output position that reads it there, or the number of
        positions.
        """
        return self._positions(
            self.inputs,
            self.outputs,
            lambda axis, place, tap: (
                place + self.padding[axis] - tap * self.dilation[axis],
                self.stride[axis],
            ),
        )

    def _positions(
        self,
        here: tuple[int, ...],
        there: tuple[int, ...],
        place: Callable[[int, NDArray[np.int64], NDArray[np.int64]], tuple[NDArray[np.int64], int]],
    ) -> NDArray[np.int64]:
        """Flat positions in ``there``, int64 [prod(here), taps].

        Outside or between steps: ``prod(there)``.
        """
        rank = len(here)
        flat = np.zeros((1,) * (2 * rank), np.int64)
        valid = np.ones_like(flat, bool)
        for axis, size in enumerate(there):
            shape = [1] * (2 * rank)
            shape[axis] = here[axis]
            places = np.arange(here[axis]).reshape(shape)
            shape = [1] * (2 * rank)
            shape[rank + axis] = self.kernel[axis]
            scaled, step = place(axis, places, np.arange(self.kernel[axis]).reshape(shape))
            index = scaled // step
            valid = valid & (scaled % step == 0) & (index >= 0) & (index < size)
            flat = flat * size + np.clip(index, 0, size - 1)
        full = np.broadcast_to(np.where(valid, flat, math.prod(there)), (*here, *self.kernel))
        return full.reshape(math.prod(here), self.taps)


def rows_of(emit: Emitter, x: Value, *, zero_row: bool) -> str:
    """A feature map as [batch, positions, channels], with one row of zeros at the end if wanted."""
    positions = math.prod(x.shape[2:])
    channels = x.shape[1]
    name = emit.arranged(x, channels_last(x.rank))
    rows = emit.reshaped(
        name, (x.shape[0], *x.shape[2:], channels), (x.shape[0], positions, channels)
    )
    return emit.graph.node("Pad", rows, emit.graph.ints(0, 0, 0, 0, 1, 0)) if zero_row else rows


def look_up(emit: Emitter, x: Value, table: NDArray[np.int64]) -> str:
    """The rows of ``x`` that the table names, as a matrix [batch * len(table), taps * channels]."""
    rows = rows_of(emit, x, zero_row=bool((table == math.prod(x.shape[2:])).any()))
    columns = emit.graph.node("Gather", rows, emit.graph.constant(table.reshape(-1)), axis=1)
    return emit.graph.node("Reshape", columns, emit.graph.ints(-1, table.shape[1] * x.shape[1]))


def look_up_ns(rows: int, taps: int, channels: int) -> float:
    """Cost of copying ``rows * taps`` rows of channels, in nanoseconds."""
    return rows * taps * (_ROW_NS + _FLOAT_NS * channels)


@dataclass(frozen=True)
class Columns:
    """What each output sees: a matrix [batch * outputs, taps * channels], or its transpose, as Gemm
    wants it.
    """

    name: str
    transposed: int


def columns_of(emit: Emitter, x: Value, geometry: Geometry) -> Columns:
    """The columns of a convolution, taps before channels.

    Equal nodes for forward pass and weight gradient.
    """
    channels = x.shape[1]
    if geometry.is_pointwise:
        return Columns(matrix_of(emit, x), 0)
    row = geometry.outputs[-1]
    turned = _TRANSPOSE_NS * (not x.lies(planes(x.rank)))
    by_slices = channels * (geometry.taps * (_SLICE_ROW_NS / row + _SLICE_FLOAT_NS) + turned)
    if all(step == 1 for step in geometry.stride) and by_slices < look_up_ns(
        1, geometry.taps, channels
    ):
        return Columns(_sliced(emit, x, geometry), 1)
    if _look_up_twice_ns(geometry, channels) < look_up_ns(
        math.prod(geometry.outputs), geometry.taps, channels
    ):
        return Columns(_look_up_twice(emit, x, geometry), 0)
    return Columns(look_up(emit, x, geometry.table()), 0)


def _look_up_twice_ns(geometry: Geometry, channels: int) -> float:
    """Cost per sample of first joining the taps of a kernel row and then its rows.

    Inf where that cannot be.
    """
    if len(geometry.kernel) != 2 or 1 in geometry.kernel:
        return math.inf
    height, width = geometry.kernel
    first = look_up_ns(
        (geometry.inputs[0] + 2 * geometry.padding[0]) * geometry.outputs[1],
        width,
        channels,
    )
    return first + look_up_ns(math.prod(geometry.outputs), height, width * channels)


def _look_up_twice(emit: Emitter, x: Value, geometry: Geometry) -> str:
    """The columns by two look-ups: with few channels, fewer and longer rows than by one."""
    height, width = geometry.kernel
    padding = geometry.padding[0]
    step = geometry.stride[0]
    spread = geometry.dilation[0]
    sides = Geometry(
        geometry.inputs,
        (geometry.inputs[0] + 2 * padding, geometry.outputs[1]),
        (1, width),
        (1, geometry.stride[1]),
        geometry.padding,
        (1, geometry.dilation[1]),
    )
    strips = emit.graph.node(
        "Reshape",
        look_up(emit, x, sides.table()),
        emit.graph.ints(-1, math.prod(sides.outputs), width * x.shape[1]),
    )
    rows = (
        np.arange(geometry.outputs[0])[:, None, None] * step
        + np.arange(height)[None, None] * spread
    )
    table = rows * geometry.outputs[1] + np.arange(geometry.outputs[1])[None, :, None]
    columns = emit.graph.node("Gather", strips, emit.graph.constant(table.reshape(-1)), axis=1)
    return emit.graph.node("Reshape", columns, emit.graph.ints(-1, geometry.taps * x.shape[1]))


def _sliced(emit: Emitter, x: Value, geometry: Geometry) -> str:
    """The transposed columns as shifted copies of the whole input: few channels make short rows and
    long planes.
    """
    rank = x.rank
    plane = emit.arranged(x, planes(rank))
    if any(geometry.padding):
        pads = (0, 0, *geometry.padding)
        plane = emit.graph.node("Pad", plane, emit.graph.ints(*pads, *pads))
    axes = emit.graph.ints(*range(2, rank))
    shifted = []
    for tap in itertools.product(*map(range, geometry.kernel)):
        start = [t * d for t, d in zip(tap, geometry.dilation, strict=True)]
        stop = [begin + size for begin, size in zip(start, geometry.outputs, strict=True)]
        shifted.append(
            emit.graph.node("Slice", plane, emit.graph.ints(*start), emit.graph.ints(*stop), axes)
        )
    joined = emit.graph.node("Concat", *shifted, axis=0)
    return emit.graph.node("Reshape", joined, emit.graph.ints(geometry.taps * x.shape[1], -1))


def matrix_of(emit: Emitter, x: Value) -> str:
    """A feature map as a matrix [batch * positions, channels]."""
    return emit.graph.node(
        "Reshape", rows_of(emit, x, zero_row=False), emit.graph.ints(-1, x.shape[1])
    )
