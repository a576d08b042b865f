"""Depthwise convolutions and their gradients, as matrix products for each channel.

Every channel has a small matrix, built from its weights, that maps the window of a tile to the
results of the tile (see `tiles`). Forward pass and input gradient are batched products with it,
with the channels as the batch. The gradient of the weights is the product of results and windows,
summed for each weight. No dense kernel is built. Maps are stored in planes, channels first, as the
products need them.

For large maps with a small kernel, the runtime's own operator is used if it is faster
(`group_costs`).
"""

import math
from collections.abc import Iterable, Sequence
from functools import reduce

import numpy as np

from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.geometry import Geometry
from trainer_export.lowering.group_costs import runtime_ns, tiles_ns
from trainer_export.lowering.runtime_conv import (
    fits_conv_transpose,
    runtime_conv,
    runtime_conv_transpose,
)
from trainer_export.lowering.tiles import Tiles, Tiling, backward_tiles, forward_tiles
from trainer_export.lowering.values import Shape, Spec, Value, planes


def narrow_of(emit: Emitter, out: Spec, x: Value, weight: Value, geometry: Geometry) -> Value:
    """Return a depthwise convolution.

    Args:
        emit: writes the nodes.
        out: shape of the result, [batch, channels * multiplier, ...].
        x: [batch, channels, ...].
        weight: [channels * multiplier, 1, ...].
        geometry: geometry of the convolution.
    """
    channels = x.shape[1]
    multiplier = weight.shape[0] // channels
    tiles = _shared_tiles(geometry, channels)
    by_runtime = runtime_ns(geometry, 1, multiplier, transposed=False)
    # The cost of tiles is that of one result of each channel.
    if by_runtime < multiplier * tiles_ns(tiles, channels):
        return runtime_conv(emit, out, x, weight, geometry, channels)
    windows = _windows(emit, x, _leading(channels, multiplier, 1), tiles)
    matrices = _matrices(emit, weight, channels, tiles)
    product = emit.node("MatMul", windows, matrices)
    return _as_planes(emit, product, out, tiles)


def wide_of(emit: Emitter, out: Spec, grad: Value, weight: Value, geometry: Geometry) -> Value:
    """Return the input gradient of a depthwise convolution, or a transposed one.

    Args:
        emit: writes the nodes.
        out: shape of the result, [batch, channels, ...].
        grad: [batch, channels * multiplier, ...].
        weight: [channels * multiplier, 1, ...].
        geometry: geometry of the convolution.
    """
    channels = out.shape[1]
    multiplier = weight.shape[0] // channels
    tiles = _cheapest(backward_tiles(geometry), channels)
    by_runtime = math.inf
    # The runtime's operator cannot write every output size.
    if fits_conv_transpose(geometry):
        by_runtime = runtime_ns(geometry, 1, multiplier, transposed=True)
    if by_runtime < multiplier * tiles_ns(tiles, channels):
        return runtime_conv_transpose(emit, out, grad, weight, geometry, channels)
    windows = _windows(emit, grad, _leading(channels, multiplier, multiplier), tiles)
    matrices = _matrices(emit, weight, channels, tiles)
    product = emit.node("MatMul", windows, matrices)
    if multiplier > 1:
        axes = emit.ints(1)
        # A channel's gradient is the sum over its results.
        product = emit.node("ReduceSum", product, axes, keepdims=0)
    return _as_planes(emit, product, out, tiles)


def weight_of(emit: Emitter, grad: Value, x: Value, weight: Value, geometry: Geometry) -> Value:
    """Return the gradient of a depthwise kernel.

    Args:
        emit: writes the nodes.
        grad: [batch, channels * multiplier, ...], of the results.
        x: [batch, channels, ...].
        weight: [channels * multiplier, 1, ...].
        geometry: geometry of the convolution.
    """
    channels = x.shape[1]
    outputs = weight.shape[0]
    multiplier = outputs // channels
    tiles = _shared_tiles(geometry, channels)
    by_runtime = runtime_ns(geometry, 1, multiplier, transposed=False)
    # The runtime computes the forward pass, so it shares no windows with this product.
    if by_runtime < multiplier * tiles_ns(tiles, channels):
        # Only this product needs the windows.
        tiles = _cheapest(forward_tiles(geometry), channels, turns=True)
    windows = _windows(emit, x, _leading(channels, multiplier, 1), tiles)
    results = _turned_tiles(emit, grad, _leading(channels, multiplier, multiplier), tiles)
    products = emit.node("MatMul", results, windows)
    row_sizes = emit.ints(outputs, tiles.tile * tiles.window)
    rows = emit.node("Reshape", products, row_sizes)
    # The order of the rows above: results of a tile, then places of its window, then taps.
    sums = _spread(emit, tiles.axes, (2, 1, 0))
    matrix_sizes = emit.ints(tiles.tile * tiles.window, tiles.taps)
    matrix = emit.node("Reshape", sums, matrix_sizes)
    gradient = emit.node("MatMul", rows, matrix)
    return emit.value(
        emit.reshaped(
            gradient,
            (outputs, tiles.taps),
            weight.shape,
        ),
        weight.shape,
    )


def _shared_tiles(geometry: Geometry, channels: int) -> Tiles:
    """Return the tiles whose windows results and the gradient of the weights share."""
    return _cheapest(forward_tiles(geometry), channels, products=2)


def _cheapest(
    ways: Iterable[Tiles], channels: int, *, products: int = 1, turns: bool = False
) -> Tiles:
    """Return the cheapest tiles; the first among equals."""
    # `min` keeps the first, so that equal costs always give the same graph.
    return min(ways, key=lambda tiles: tiles_ns(tiles, channels, products=products, turns=turns))


def _leading(channels: int, multiplier: int, results: int) -> list[int]:
    """Return the leading sizes of a map for a product: channels, results of each, batch.

    Args:
        channels: number of channels that the convolution reads.
        multiplier: number of results of each channel; with one there is no axis for them.
        results: number of results of each channel in this map, 1 or the multiplier.
    """
    # -1 is the batch times the tiles of a map.
    return [channels, -1] if multiplier == 1 else [channels, results, -1]


def _windows(emit: Emitter, x: Value, leading: Sequence[int], tiles: Tiles) -> str:
    """Return the windows of all tiles, [*leading, window], whose last leading size counts tiles."""
    name = emit.arranged(x, planes(x.rank))
    padding = tiles.padding
    if any(map(any, padding)):
        before = [zeros[0] for zeros in padding]
        behind = [zeros[1] for zeros in padding]
        widths = emit.ints(0, 0, *before, 0, 0, *behind)
        name = emit.node("Pad", name, widths)
    # Windows overlap or are only a part of the map, so they are gathered from runs of it.
    if not tiles.is_whole:
        runs = math.prod(tiles.padded) // tiles.run
        run_sizes = emit.ints(-1, runs, tiles.run)
        cut = emit.node("Reshape", name, run_sizes)
        table = emit.constant(tiles.table())
        name = emit.node("Gather", cut, table, axis=1)
    sizes = emit.ints(*leading, tiles.window)
    return emit.node("Reshape", name, sizes)


def _turned_tiles(emit: Emitter, grad: Value, leading: Sequence[int], tiles: Tiles) -> str:
    """Return the results of all tiles, [*leading without the last, tile, batch * tiles]."""
    name = emit.arranged(grad, planes(grad.rank))
    # The last tile may extend beyond the map; its results are zeros.
    missing = [axis.missing for axis in tiles.axes]
    if any(missing):
        zeros = [0] * len(missing)
        widths = emit.ints(0, 0, *zeros, 0, 0, *missing)
        name = emit.node("Pad", name, widths)
    rank = len(tiles.axes)
    inner = []
    for axis in tiles.axes:
        inner += [axis.count, axis.tile]
    split_sizes = emit.ints(-1, *inner)
    split = emit.node("Reshape", name, split_sizes)
    # The axis of tiles comes before the results of a tile, as in windows.
    # 2 stands for the dynamic first axis: any size but 1.
    order = _neighbours(
        [
            0,
            *range(1, 2 * rank, 2),
            *range(2, 2 * rank + 1, 2),
        ],
        [2, *inner],
    )
    if order is not None:
        split = emit.node("Transpose", split, perm=order)
    sizes = emit.ints(*leading, tiles.tile)
    rows = emit.node("Reshape", split, sizes)
    last = len(leading)
    # Windows have the places last, so the product sums over the batch and all tiles.
    return emit.node(
        "Transpose",
        rows,
        perm=[*range(last - 1), last, last - 1],
    )


def _as_planes(emit: Emitter, product: str, out: Spec, tiles: Tiles) -> Value:
    """Return results, tile by tile, as a map in planes."""
    rank = len(tiles.axes)
    counts = [axis.count for axis in tiles.axes]
    sizes = [axis.tile for axis in tiles.axes]
    # Each axis of tiles is followed by the results of a tile along it.
    perm = [0]
    for number in range(rank):
        perm += [1 + number, 1 + rank + number]
    order = _neighbours(perm, [2, *counts, *sizes])
    name = product
    if order is not None:
        split_sizes = emit.ints(-1, *counts, *sizes)
        split = emit.node("Reshape", name, split_sizes)
        name = emit.node("Transpose", split, perm=order)
    whole = [axis.count * axis.tile for axis in tiles.axes]
    map_sizes = emit.ints(out.shape[1], -1, *whole)
    name = emit.node("Reshape", name, map_sizes)
    # Results beyond the map belong to the last tile only.
    if any(axis.missing for axis in tiles.axes):
        starts = emit.ints(*[0] * rank)
        ends = emit.ints(*out.shape[2:])
        axes = emit.ints(*range(2, 2 + rank))
        name = emit.node("Slice", name, starts, ends, axes)
    return emit.value(name, out.shape, order=planes(len(out.shape)))


def _neighbours(perm: Sequence[int], sizes: Sequence[int]) -> list[int] | None:
    """Return a permutation of axes, or None if only axes of size 1 move."""
    # Axes of size 1 may move without moving data.
    moved = [axis for axis in perm if sizes[axis] != 1]
    return None if moved == sorted(moved) else list(perm)


def _matrices(emit: Emitter, weight: Value, channels: int, tiles: Tiles) -> str:
    """Return the matrix of every channel, [channels, (multiplier,) window, tile]."""
    outputs = weight.shape[0]
    taps = emit.reshaped(emit.in_logical_order(weight), weight.shape, (outputs, tiles.taps))
    spread = _spread(emit, tiles.axes, (0, 1, 2))
    spread_sizes = emit.ints(tiles.taps, tiles.window * tiles.tile)
    places = emit.node("Reshape", spread, spread_sizes)
    product = emit.node("MatMul", taps, places)
    leading: Shape = (channels,) if outputs == channels else (channels, outputs // channels)
    sizes = emit.ints(*leading, tiles.window, tiles.tile)
    return emit.node("Reshape", product, sizes)


def _spread(emit: Emitter, axes: Sequence[Tiling], order: Sequence[int]) -> str:
    """Return 1 if a result of a tile reads a place of its window by a tap, else 0.

    It is the product of the relations along each axis; only these are stored.

    Args:
        emit: writes the nodes.
        axes: axes of the tiles.
        order: order of taps (0), places (1) and results (2), each axis by axis.
    """
    factors = []
    rank = len(axes)
    for number, axis in enumerate(axes):
        turned = axis.relation.transpose(tuple(order))
        shape = [1] * (3 * rank)
        for place, size in enumerate(turned.shape):
            # Axes of one kind stay together: all taps, all places, all results.
            shape[place * rank + number] = size
        factors.append(emit.constant(np.ascontiguousarray(turned).reshape(shape)))
    return reduce(lambda left, right: emit.node("Mul", left, right), factors)
