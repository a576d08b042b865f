"""Convolutions with 3x3 kernels by Winograd's algorithm: fewer multiplications on larger tiles.

A tile of ``m x m`` results reads ``n x n`` places, ``n = m + 2``. With small constant matrices,
``Y = A^T ((G w G^T) * (B^T x B)) A``: places and kernel are transformed, multiplied place by place
(one matrix product over channels for each of the ``n^2`` places), and transformed back (Lavin,
Gray: "Fast Algorithms for Convolutional Neural Networks", CVPR 2016). A tile of 4 x 4 needs 36
products in place of 144.

The matrices come from the points at which polynomials are evaluated (Toom, Cook). Points of very
different size lose digits; 1/2 and -2 lose fewest for the largest tile (Barabasz, Anderson,
Soodhalter, Gregg: "Error Analysis and Improving the Accuracy of Winograd Convolution for Deep
Neural Networks", ACM TOMS 2020). Measured in float32 on 64 channels, the largest error is then
1e-5 of the standard deviation of the results, against 2e-6 by a matrix product with columns.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.geometry import Geometry
from trainer_export.lowering.values import Spec, Value, channels_last

_TAPS = 3  # height and width of a kernel
_SPACE_FIRST = (2, 3, 0, 1)  # height, width, batch, channels
_POINTS: Mapping[int, tuple[float, ...]] = MappingProxyType(
    {
        2: (0, 1, -1),
        3: (0, 1, -1, 0.5),
        4: (0, 1, -1, 0.5, -2),
    }
)
SIZES = tuple(_POINTS)
"""Heights and widths that a tile of results may have."""


@dataclass(frozen=True)
class Tiling:
    """The tiles of a convolution.

    Attributes:
        geometry: the convolution; see `tilings_of`.
        size: height and width of a tile of results, one of `SIZES`.
    """

    geometry: Geometry
    size: int

    @property
    def counts(self) -> tuple[int, ...]:
        """Tiles along height and width; the last ones may reach beyond the results."""
        return tuple(math.ceil(results / self.size) for results in self.geometry.outputs)

    @property
    def window(self) -> int:
        """Height and width of the places that a tile reads."""
        return self.size + _TAPS - 1

    def table(self) -> NDArray[np.int64]:
        """Return for each place of a window and each tile the flat position that is read.

        The number of all positions stands for a zero.
        """
        return self._positions(self.window, self.geometry.padding, self.geometry.inputs)

    def results_table(self) -> NDArray[np.int64]:
        """Return for each result of a tile and each tile the flat position of the result.

        The number of all results stands for a zero.
        """
        return self._positions(self.size, (0, 0), self.geometry.outputs)

    def _positions(
        self,
        extent: int,
        padding: Sequence[int],
        sizes: Sequence[int],
    ) -> NDArray[np.int64]:
        """Return the flat positions of squares that begin at each tile.

        Args:
            extent: height and width of a square.
            padding: rows and columns before the map.
            sizes: height and width of the map, whose product stands for a position outside.
        """
        axes = []
        for axis, count in enumerate(self.counts):
            first = np.arange(count) * self.size - padding[axis]
            axes.append(np.arange(extent)[:, None] + first)
        rows = axes[0][:, None, :, None]
        columns = axes[1][None, :, None, :]
        height, width = sizes
        inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
        return np.where(inside, rows * width + columns, height * width).reshape(-1)

    def matrices(self) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
        """Return the transforms of flat places, kernels and products.

        Float32 [n*n, n*n], [n*n, 9] and [m*m, n*n].
        """
        results = _powers(self.size, self.size)
        taps = _powers(self.size, _TAPS)
        places = np.linalg.inv(_powers(self.size, self.window)).T
        return _both(places), _both(taps), _both(results.T)


def tilings_of(geometry: Geometry) -> list[Tiling]:
    """Return the tilings of a convolution; none unless it has 3x3 taps and steps of one place."""
    fits = (
        geometry.kernel == (_TAPS, _TAPS)
        and geometry.stride == (1, 1)
        and geometry.dilation == (1, 1)
    )
    return [Tiling(geometry, size) for size in SIZES] if fits else []


def _powers(size: int, count: int) -> NDArray[np.float64]:
    """Return the powers of each point, [n, count], and for infinity a 1 in the last place."""
    finite = np.vander(np.array(_POINTS[size], np.float64), count, increasing=True)
    infinity = np.zeros((1, count))
    infinity[0, -1] = 1
    return np.concatenate([finite, infinity])


def _both(matrix: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the transform along height and width at once."""
    return np.kron(matrix, matrix).astype(np.float32)


def winograd(  # noqa: PLR0913  (what a convolution is)
    emit: Emitter,
    out: Spec,
    x: Value,
    weight: Value,
    tiling: Tiling,
    *,
    turned: bool = False,
) -> Value:
    """Return a convolution without its bias, channels-last.

    Between its transforms, a map has the batch behind its places, so that every transform is one
    product for all samples and channels.

    Args:
        emit: the emitter.
        out: shape of the result.
        x: the complete map.
        weight: the kernel [outputs, inputs, 3, 3].
        tiling: the tiles of the convolution.
        turned: whether to use the kernel turned by 180 degrees, from its outputs to its inputs.
    """
    to_places, to_taps, to_results = tiling.matrices()
    flat = emit.ints(len(to_places), -1)
    rows = _transformed_squares(emit, x, tiling.table(), to_places)
    if turned:
        to_taps = to_taps[:, ::-1]
    kernels = _transformed(emit, weight, to_taps)
    if not turned:
        # After the transform: to move runs of nine taps takes twice as long.
        kernels = emit.node("Transpose", kernels, perm=[0, 2, 1])
    products = emit.node("MatMul", rows, kernels)
    flat_products = emit.node("Reshape", products, flat)
    results = emit.node("MatMul", emit.constant(to_results), flat_products)
    joined = _joined(emit, results, out.shape[1], tiling)
    return emit.value(joined, out.shape, order=channels_last(4))


def _transformed(emit: Emitter, weight: Value, to_taps: NDArray[np.float32]) -> str:
    """Return the transformed kernel, [places of a window, outputs, inputs]."""
    outputs, inputs = weight.shape[:2]
    kernel = emit.reshaped(
        emit.in_logical_order(weight), weight.shape, (outputs * inputs, _TAPS * _TAPS)
    )
    matrix = emit.constant(np.ascontiguousarray(to_taps))
    transformed = emit.node("Gemm", matrix, kernel, transB=1)
    return emit.node("Reshape", transformed, emit.ints(len(to_taps), outputs, inputs))


def _transformed_squares(
    emit: Emitter,
    x: Value,
    table: NDArray[np.int64],
    transform: NDArray[np.float32],
) -> str:
    """Return the transformed squares of a map, [places of a window, tiles * batch, channels].

    Args:
        emit: the emitter.
        x: the complete map.
        table: flat positions [places of a square * tiles]; the number of all stands for a zero.
        transform: float32 [places of a window, places of a square].
    """
    windows, squares = transform.shape
    positions = math.prod(x.shape[2:])
    rows = emit.node("Reshape", emit.arranged(x, _SPACE_FIRST), emit.ints(positions, -1))
    if (table == positions).any():
        rows = emit.node("Pad", rows, emit.ints(0, 0, 1, 0))
    gathered = emit.node("Gather", rows, emit.constant(table), axis=0)
    matrix = emit.node("Reshape", gathered, emit.ints(squares, -1))
    transformed = emit.node("MatMul", emit.constant(transform), matrix)
    return emit.node("Reshape", transformed, emit.ints(windows, -1, x.shape[1]))


def _joined(emit: Emitter, results: str, outputs: int, tiling: Tiling) -> str:
    """Return the tiles of results, [places of a tile, tiles * batch * outputs], as a map."""
    size = tiling.size
    down, across = tiling.counts
    apart = emit.node("Reshape", results, emit.ints(size, size, down, across, -1, outputs))
    ordered = emit.node("Transpose", apart, perm=[4, 2, 0, 3, 1, 5])
    covered = (size * down, size * across)
    joined = emit.node("Reshape", ordered, emit.ints(-1, *covered, outputs))
    if covered == tiling.geometry.outputs:
        return joined
    ends = emit.ints(*tiling.geometry.outputs)
    return emit.node("Slice", joined, emit.ints(0, 0), ends, emit.ints(1, 2))


def winograd_kernel_gradient(
    emit: Emitter,
    grad: Value,
    x: Value,
    tiling: Tiling,
) -> Value:
    """Return the gradient of a kernel, [outputs, inputs, 3, 3].

    Every transform is linear, so the gradient is its transpose: slopes become places of windows,
    and the products of places become taps.

    Args:
        emit: the emitter.
        grad: the gradient of the convolution's result, complete.
        x: the complete map that the convolution reads.
        tiling: the tiles of the convolution.
    """
    to_places, to_taps, to_results = tiling.matrices()
    shape = (grad.shape[1], x.shape[1], _TAPS, _TAPS)
    # In reversed order, so that these windows are not those of the forward pass, which would wait
    # in memory until the gradient.
    table = tiling.table().reshape(len(to_places), -1)[::-1].reshape(-1)
    to_places = np.ascontiguousarray(to_places[:, ::-1])
    rows = _transformed_squares(emit, x, table, to_places)
    from_results = np.ascontiguousarray(to_results.T)
    slopes = _transformed_squares(emit, grad, tiling.results_table(), from_results)
    slope_columns = emit.node("Transpose", slopes, perm=[0, 2, 1])
    products = emit.node("MatMul", slope_columns, rows)
    flat = emit.node("Reshape", products, emit.ints(len(to_places), -1))
    taps = emit.node("Gemm", flat, emit.constant(to_taps), transA=1)
    numbers = (shape[0] * shape[1], _TAPS * _TAPS)
    return emit.value(emit.reshaped(taps, numbers, shape), shape)
