"""Tiles of a one-channel convolution: the places that a tile of results reads, and the taps.

All results of a tile are one product of the places in its window and a small matrix. The matrix has
a weight where a result reads a place by its tap, and 0 elsewhere (a block of a Toeplitz matrix).
All tiles of a channel share that matrix. So a depthwise convolution is a matrix product per
channel, which the runtime computes near the machine's peak speed, while its own depthwise Conv
copies single numbers.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from trainer_export.lowering.geometry import Geometry

_MOST_ROWS = 8  # largest height of a tile: higher tiles multiply more zeros than they save copies
_WIDTHS = (8, 16, 32)  # sizes of tiles along the last axis


@dataclass(frozen=True)
class Tiling:
    """Tiles along an axis, each with the window of source places that its results read.

    Attributes:
        size: number of source places.
        results: number of results, of which the last tile may have fewer.
        tile: results of a tile.
        count: number of tiles.
        start: first place of the first window; below 0 before the first place.
        step: places from one window to the next.
        window: places of a window.
        relation: float32 [taps, window, tile], 1 where a result reads a place by a tap.
        has_runs: whether windows consist of whole runs of `step` places.
    """

    size: int
    results: int
    tile: int
    count: int
    start: int
    step: int
    window: int
    relation: NDArray[np.float32]
    has_runs: bool = False

    @property
    def is_whole(self) -> bool:
        """Return whether one window covers all places, so that nothing needs to be copied."""
        return self.count == 1 and self.start == 0 and self.window == self.size

    @property
    def missing(self) -> int:
        """Surplus results of the last tile."""
        return self.tile * self.count - self.results

    @property
    def before(self) -> int:
        """Zeros before the first place."""
        return max(0, -self.start)

    @property
    def behind(self) -> int:
        """Zeros behind the last place."""
        end = self.start + (self.count - 1) * self.step + self.window
        return max(0, end - self.size)

    def in_runs(self) -> "Tiling":
        """Return these tiles with windows of whole runs, the distance between two windows."""
        if self.is_whole:
            return self
        # Windows begin at a boundary of runs; below 0 are the zeros of the padding, which shift the
        # boundary.
        start = min(self.start, 0)
        needed = self.start - start + self.window
        window = math.ceil(needed / self.step) * self.step
        relation = np.zeros((len(self.relation), window, self.tile), np.float32)
        relation[:, self.start - start : needed] = self.relation
        return Tiling(
            self.size,
            self.results,
            self.tile,
            self.count,
            start,
            self.step,
            window,
            relation,
            has_runs=True,
        )


@dataclass(frozen=True)
class Axis:
    """A convolution along one axis: a result ``o`` reads ``o * stride + tap * dilation - padding``.

    Attributes:
        wide: number of places that it reads.
        narrow: number of results.
    """

    wide: int
    narrow: int
    taps: int
    stride: int
    padding: int
    dilation: int

    def forward(self, tile: int) -> Tiling:
        """Return tiles of the results of the convolution."""
        # One tile: the window is every place, so even a padding needs no zeros, only empty rows of
        # the relation.
        if tile >= self.narrow:
            relation = self._relation(range(self.wide), range(self.narrow))
            return _whole(self.wide, self.narrow, relation)
        window = (tile - 1) * self.stride + (self.taps - 1) * self.dilation + 1
        places = range(-self.padding, window - self.padding)
        return Tiling(
            self.wide,
            self.narrow,
            tile,
            math.ceil(self.narrow / tile),
            -self.padding,
            tile * self.stride,
            window,
            self._relation(places, range(tile)),
        )

    def backward(self, tile: int) -> Tiling:
        """Return tiles of the places, each with the results that read one of them.

        Args:
            tile: places of a tile, a multiple of the stride.
        """
        if tile >= self.wide:
            relation = self._relation(range(self.wide), range(self.narrow))
            return _whole(self.narrow, self.wide, relation.transpose(0, 2, 1))
        reach = (self.taps - 1) * self.dilation
        # The first result whose last tap reaches the first place of the tile.
        first = math.ceil((self.padding - reach) / self.stride)
        # The last result whose first tap lies on the tile.
        last = (tile - 1 + self.padding) // self.stride
        relation = self._relation(range(tile), range(first, last + 1))
        return Tiling(
            self.narrow,
            self.wide,
            tile,
            math.ceil(self.wide / tile),
            first,
            tile // self.stride,
            last + 1 - first,
            relation.transpose(0, 2, 1),
        )

    def _relation(self, places: range, results: range) -> NDArray[np.float32]:
        """Return float32 [taps, places, results], 1 where a result reads a place by a tap."""
        tap = np.arange(self.taps)[:, None, None]
        place = np.array(places)[None, :, None]
        result = np.array(results)[None, None, :]
        read = result * self.stride + tap * self.dilation - self.padding
        return np.asarray(read == place, np.float32)


def _whole(size: int, results: int, relation: NDArray[np.float32]) -> Tiling:
    return Tiling(size, results, results, 1, 0, 0, size, relation)


def axes_of(geometry: Geometry) -> tuple[Axis, ...]:
    """Return the axes of a convolution."""
    axes = []
    for number in range(len(geometry.inputs)):
        axis = Axis(
            geometry.inputs[number],
            geometry.outputs[number],
            geometry.kernel[number],
            geometry.stride[number],
            geometry.padding[number],
            geometry.dilation[number],
        )
        axes.append(axis)
    return tuple(axes)


@dataclass(frozen=True)
class Tiles:
    """Tiles along all axes of a map."""

    axes: tuple[Tiling, ...]

    @property
    def is_whole(self) -> bool:
        """Whether one tile is all."""
        return all(axis.is_whole for axis in self.axes)

    @property
    def count(self) -> int:
        """Tiles of a map."""
        return math.prod(axis.count for axis in self.axes)

    @property
    def window(self) -> int:
        """Places that a tile reads."""
        return math.prod(axis.window for axis in self.axes)

    @property
    def tile(self) -> int:
        """Results of a tile."""
        return math.prod(axis.tile for axis in self.axes)

    @property
    def taps(self) -> int:
        """Weights of a channel."""
        return math.prod(len(axis.relation) for axis in self.axes)

    @property
    def padding(self) -> list[tuple[int, int]]:
        """Zeros before and behind the places of every axis."""
        zeros = []
        for axis in self.axes:
            behind = axis.behind
            if axis.has_runs:
                # The whole axis is cut into runs.
                behind += -(axis.size + axis.before + axis.behind) % axis.step
            zeros.append((axis.before, behind))
        return zeros

    @property
    def padded(self) -> list[int]:
        """Number of places along each axis, including zeros."""
        sizes = []
        for axis, (before, behind) in zip(self.axes, self.padding, strict=True):
            sizes.append(before + axis.size + behind)
        return sizes

    @property
    def run(self) -> int:
        """Number of consecutive places that are copied together."""
        run = 1
        for axis in reversed(self.axes):
            if not axis.is_whole:
                return run * axis.step if axis.has_runs else run
            run *= axis.size
        return run

    def table(self) -> NDArray[np.int64]:
        """Return for every tile the runs of its window, int64 [tiles * runs of a window]."""
        # The trailing axes that every run holds whole do not need separate places.
        cut = list(self.axes)
        while cut and cut[-1].is_whole:
            cut.pop()
        padded = self.padded
        rank = len(cut)
        flat = np.zeros((1,) * (2 * rank), np.int64)
        for number, axis in enumerate(cut):
            unit = axis.step if axis.has_runs else 1
            start = (axis.start + axis.before) // unit
            tiles = np.arange(axis.count) * (axis.step // unit)
            places = start + tiles[:, None] + np.arange(axis.window // unit)
            shape = [1] * (2 * rank)
            shape[number] = axis.count
            shape[rank + number] = axis.window // unit
            # Row-major over the padded map, axis by axis, as the runtime flattens it.
            flat = flat * (padded[number] // unit) + places.reshape(shape)
        return flat.reshape(-1)


def _tilings(axes: Sequence[Tiling]) -> Iterator[Tiles]:
    """Return the ways to copy the windows of tiles: row by row, or in longer runs."""
    last = len(axes) - 1
    while last > 0 and axes[last].is_whole:
        last -= 1
    in_runs = Tiles((*axes[:last], axes[last].in_runs(), *axes[last + 1 :]))
    # Single numbers of the last axis are never copied one by one.
    if last < len(axes) - 1:
        yield Tiles(tuple(axes))
    yield in_runs


def forward_tiles(geometry: Geometry) -> Iterator[Tiles]:
    """Return the ways to tile the results of a convolution."""
    axes = axes_of(geometry)
    for sizes in _sizes([axis.narrow for axis in axes], [1] * len(axes)):
        yield from _tilings([axis.forward(size) for axis, size in zip(axes, sizes, strict=True)])


def backward_tiles(geometry: Geometry) -> Iterator[Tiles]:
    """Return the ways to tile the places that a convolution reads."""
    axes = axes_of(geometry)
    strides = [axis.stride for axis in axes]
    for sizes in _sizes([axis.wide for axis in axes], strides):
        yield from _tilings([axis.backward(size) for axis, size in zip(axes, sizes, strict=True)])


def _sizes(results: list[int], strides: list[int]) -> Iterator[tuple[int, ...]]:
    """Return sizes of tiles along every axis: small multiples of the stride, or all results."""
    choices = []
    for number, (count, stride) in enumerate(zip(results, strides, strict=True)):
        is_last = number == len(results) - 1
        # Along the last axis tiles are as wide as vector registers are; along the others any height
        # may pay.
        steps = _WIDTHS if is_last else range(1, _MOST_ROWS + 1)
        sizes = [step * stride for step in steps if step * stride < count]
        choices.append([*sizes, count])
    yield from product(*choices)
