"""Estimates the costs of convolutions by columns, by Winograd's algorithm, and by the runtime."""

import math

from trainer_export.lowering.geometry import Geometry
from trainer_export.lowering.values import BATCH_HINT, Value
from trainer_export.lowering.winograd import Tiling, tilings_of

# Nanoseconds, measured with one thread of an x86-64 server on 2026-11-30; only their ratios matter.
# Per floating point operation: of a product with columns, of the products and transforms of
# Winograd's algorithm, and of the runtime's operator.
_COLUMNS_FLOP_NS = 0.01
_TILES_FLOP_NS = 0.015
_RUNTIME_FLOP_NS = 0.013
# To copy a row of channels by a look-up, and a number of it.
_ROW_NS = 8.0
_FLOAT_NS = 0.25
# To transform a number of a kernel, once for all samples.
_KERNEL_NS = 1.2


def columns_ns(geometry: Geometry, inputs: int, outputs: int) -> float:
    """Return the cost per sample of a product with columns."""
    results = math.prod(geometry.outputs)
    look_ups = results * geometry.taps * (_ROW_NS + _FLOAT_NS * inputs)
    if geometry.is_pointwise:
        look_ups = 0.0
    return look_ups + 2 * results * geometry.taps * inputs * outputs * _COLUMNS_FLOP_NS


def tiles_ns(tiling: Tiling, inputs: int, outputs: int) -> float:
    """Return the cost per sample of Winograd's algorithm."""
    tiles = math.prod(tiling.counts)
    places = tiling.window**2
    results = tiling.size**2
    # The transform of the windows, the products, the transform of the results.
    multiplied = places * (places * inputs + inputs * outputs + results * outputs)
    numbers = math.prod(tiling.geometry.inputs) * inputs
    moved = numbers + tiles * (places * inputs + results * outputs)
    kernel = places * inputs * outputs * _KERNEL_NS / BATCH_HINT
    return 2 * tiles * multiplied * _TILES_FLOP_NS + moved * _FLOAT_NS + kernel


def runtime_ns(geometry: Geometry, x: Value, outputs: int) -> float:
    """Return the cost per sample of the runtime's operator, which needs and returns plain order."""
    inputs: int = x.shape[1]
    results = math.prod(geometry.outputs)
    moved = results * outputs
    if not x.is_plain:
        moved += math.prod(geometry.inputs) * inputs
    flops = 2 * results * geometry.taps * inputs * outputs
    return flops * _RUNTIME_FLOP_NS + moved * _FLOAT_NS


def cheaper_tiling(geometry: Geometry, inputs: int, outputs: int) -> Tiling | None:
    """Return the tiles with which Winograd's algorithm is the cheapest.

    Returns:
        None if the product with columns is cheaper, or if the convolution has other windows.
    """
    best = None
    lowest = columns_ns(geometry, inputs, outputs)
    for tiling in tilings_of(geometry):
        cost = tiles_ns(tiling, inputs, outputs)
        if cost < lowest:
            best = tiling
            lowest = cost
    return best
