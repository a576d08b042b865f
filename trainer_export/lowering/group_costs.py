"""Measured costs of the ways to write a grouped convolution.

Measured on 2026-11-28 with onnxruntime 1.31.1, one thread of an AMD EPYC (AVX2) that other work
shared, batches of 16, maps of 3 x 3 to 48 x 48, kernels of 3 x 3 and 5 x 5. Nanoseconds of
processor time; only their ratios matter.
"""

import math

from trainer_export.lowering.geometry import Geometry
from trainer_export.lowering.tiles import Tiles
from trainer_export.lowering.values import BATCH_HINT

_FLOP_NS = 0.014  # per multiply-add of large matrix products
_BLOCK = 16  # columns of a block of a product; 24 take as long as 32 (2026-11-30)
_PRODUCT_START_NS = 400.0  # to start the product of a channel
_PACKED_NS = 0.6  # to pack a number of the right matrix before a product
_RUN_NS = 8.0  # to copy a row of numbers, and each of its numbers
_COPIED_NS = 0.18
_PADDED_NS = 0.3
_PADDED_ROWS_NS = 1.0  # if zeros are between rows
_TURNED_NS = 0.8  # to transpose
_MOVED_NS = 0.3  # to move the map of a channel as a whole

# The runtime's Conv and ConvTranspose, which copy the map for each tap before the product.
_CHANNEL_NS = 400.0
_ROW_NS = 4.5
_TAP_NS = 0.36
_STRIDED_TAP_NS = 0.65
_TRANSPOSED = 1.15  # ConvTranspose relative to Conv


def tiles_ns(tiles: Tiles, channels: int, *, products: int = 1, turns: bool = False) -> float:
    """Return the cost of depthwise products by tiles, for a sample and a channel.

    Args:
        tiles: the tiling of the results.
        channels: number of channels of the map.
        products: products that share the windows: with 2, results and the gradient of weights.
        turns: whether the product is that of results and windows, for the gradient of weights.
    """
    window = tiles.window
    columns = _columns(tiles.tile)
    product = tiles.count * 2 * window * columns * _FLOP_NS
    matrix = tiles.tile * window * (2 * tiles.taps * _FLOP_NS + _PACKED_NS)
    shared = tiles.tile * window * tiles.taps / channels
    per_sample = (matrix + shared + _PRODUCT_START_NS) / BATCH_HINT
    results = tiles.tile * tiles.count
    turned = _TURNED_NS * results if turns else 0.0
    # Results beyond the map are cut off, and padded again for the gradient of the weights.
    cut = _PADDED_NS * results if any(axis.missing for axis in tiles.axes) else 0.0
    return products * (product + cut) + per_sample + turned + _windows_ns(tiles)


def _columns(count: int) -> int:
    """Return the effective number of columns of a product."""
    return math.ceil(count / _BLOCK) * _BLOCK


def _windows_ns(tiles: Tiles) -> float:
    """Return the cost of copying the windows of all tiles together."""
    if tiles.is_whole:
        return 0.0
    numbers = tiles.count * tiles.window
    copied = numbers * _COPIED_NS + numbers / tiles.run * _RUN_NS
    *leading, last = tiles.padding
    if any(last):
        return copied + _PADDED_ROWS_NS * math.prod(tiles.padded)
    if any(map(any, leading)):
        return copied + _PADDED_NS * math.prod(tiles.padded)
    return copied


def runtime_ns(geometry: Geometry, inputs: int, outputs: int, *, transposed: bool) -> float:
    """Return the cost of the runtime's own operator, for a sample and a group.

    Args:
        geometry: geometry of the convolution.
        inputs: channels of a group.
        outputs: outputs of a group.
        transposed: whether it is ConvTranspose.
    """
    places = math.prod(geometry.outputs)
    rows = math.prod(geometry.outputs[:-1])
    is_strided = max(geometry.stride) > 1
    tap = _STRIDED_TAP_NS if is_strided else _TAP_NS
    copied = geometry.taps * inputs * (rows * _ROW_NS + places * tap)
    product = 2 * geometry.taps * inputs * places * max(outputs - 1, 0) * _FLOP_NS
    operator = (_CHANNEL_NS + copied + product) * (_TRANSPOSED if transposed else 1.0)
    moved = (math.prod(geometry.inputs) * inputs + places * outputs) * _MOVED_NS
    return operator + moved


def columns_ns(geometry: Geometry, inputs: int, outputs: int, places: int) -> float:
    """Return the cost of a product of looked-up rows of a group, for a sample and a group.

    Args:
        geometry: geometry of the convolution.
        inputs: channels of a group that are looked up.
        outputs: channels of a group that result.
        places: places of the result.
    """
    rows = places * geometry.taps
    columns = _columns(outputs)
    looked_up = rows * (_RUN_NS + _COPIED_NS * inputs)
    turned = _TURNED_NS * (math.prod(geometry.inputs) * inputs + places * outputs)
    return (
        looked_up + 2 * rows * inputs * columns * _FLOP_NS + turned + _PRODUCT_START_NS / BATCH_HINT
    )
