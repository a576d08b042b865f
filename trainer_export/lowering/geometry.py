"""The static shape of a convolution, and which inputs and outputs belong together."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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
        """Return whether every output reads one input, at its own place."""
        return self.taps == 1 and self.inputs == self.outputs

    @property
    def is_patches(self) -> bool:
        """Return whether every input belongs to the window of one output."""
        covered = []
        for size, width in zip(self.outputs, self.kernel, strict=True):
            covered.append(size * width)
        side_by_side = self.stride == self.kernel and self.inputs == tuple(covered)
        return side_by_side and not any(self.padding) and max(self.dilation) == 1

    def table(self) -> NDArray[np.int64]:
        """Return for each output and tap the flat input position that it reads.

        The number of all positions stands for a zero.
        """
        indices = []
        for axis in range(len(self.outputs)):
            output, tap = self._grid(self.outputs, axis)
            start = output * self.stride[axis]
            indices.append(start + tap * self.dilation[axis] - self.padding[axis])
        return self._flat(indices, self.inputs, self.outputs)

    def reverse_table(self) -> NDArray[np.int64]:
        """Return for each input and tap the flat output position that reads it there.

        The number of positions means no output.
        """
        indices = []
        for axis in range(len(self.inputs)):
            place, tap = self._grid(self.inputs, axis)
            scaled = place + self.padding[axis] - tap * self.dilation[axis]
            # Between two strides there is no output.
            on_step = scaled % self.stride[axis] == 0
            indices.append(
                np.where(
                    on_step,
                    scaled // self.stride[axis],
                    -1,
                )
            )
        return self._flat(indices, self.outputs, self.inputs)

    def _grid(
        self,
        sizes: tuple[int, ...],
        axis: int,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return places and taps along an axis, to be broadcast over all axes of both."""
        rank = len(sizes)
        # Axes of places come first, then the axes of taps.
        place_sizes = [1] * (2 * rank)
        place_sizes[axis] = sizes[axis]
        places = np.arange(sizes[axis])
        tap_sizes = [1] * (2 * rank)
        tap_sizes[rank + axis] = self.kernel[axis]
        taps = np.arange(self.kernel[axis])
        return places.reshape(place_sizes), taps.reshape(tap_sizes)

    def _flat(
        self,
        indices: list[NDArray[np.int64]],
        there: tuple[int, ...],
        here: tuple[int, ...],
    ) -> NDArray[np.int64]:
        """Return flat positions, int64 [prod(here), taps], of an index for each axis of ``there``.

        A position outside becomes ``prod(there)``.
        """
        flat = np.zeros((1,) * (2 * len(here)), np.int64)
        valid = np.ones_like(flat, bool)
        for index, size in zip(indices, there, strict=True):
            valid = valid & (index >= 0) & (index < size)
            # Clipped, so that an invalid index cannot overflow into a valid position.
            flat = flat * size + np.clip(index, 0, size - 1)
        positions = np.where(valid, flat, math.prod(there))
        full = np.broadcast_to(positions, (*here, *self.kernel))
        return full.reshape(math.prod(here), self.taps)

    @property
    def turned(self) -> "Geometry":
        """The convolution with the turned kernel that is the input gradient; for steps of one."""
        padding = []
        for size, tap_step, before in zip(self.kernel, self.dilation, self.padding, strict=True):
            padding.append((size - 1) * tap_step - before)
        return Geometry(
            self.outputs, self.inputs, self.kernel, self.stride, tuple(padding), self.dilation
        )
