"""Lowering of convolutions whose kernels are not trained, in the cheapest of three ways.

The first is the product with columns, which trained convolutions use as well. The second is
Winograd's algorithm, for 3x3 kernels. The third is the runtime's own operator, which is the fastest
on images, whose few channels make many short columns.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from trainer_export import frozen_convolutions  # noqa: F401 - registers shoal::frozen_convolution
from trainer_export.lowering.columns import Geometry
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.rules.conv import convolved, with_bias
from trainer_export.lowering.runtime_conv import runtime_conv
from trainer_export.lowering.values import BATCH_HINT, Spec, Value
from trainer_export.lowering.windows import Convolution
from trainer_export.lowering.winograd import SIZES, Tiling, fits_winograd, winograd

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

_Way = tuple[float, Callable[[], Value]]


def _columns_ns(geometry: Geometry, inputs: int, outputs: int) -> float:
    """Return the cost per sample of a product with columns."""
    results = math.prod(geometry.outputs)
    look_ups = results * geometry.taps * (_ROW_NS + _FLOAT_NS * inputs)
    if geometry.is_pointwise:
        look_ups = 0.0
    return look_ups + 2 * results * geometry.taps * inputs * outputs * _COLUMNS_FLOP_NS


def _tiles_ns(tiling: Tiling, inputs: int, outputs: int) -> float:
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


def _runtime_ns(geometry: Geometry, x: Value, outputs: int) -> float:
    """Return the cost per sample of the runtime's operator, which needs and returns plain order."""
    inputs: int = x.shape[1]
    results = math.prod(geometry.outputs)
    moved = results * outputs
    if not x.is_plain:
        moved += math.prod(geometry.inputs) * inputs
    flops = 2 * results * geometry.taps * inputs * outputs
    return flops * _RUNTIME_FLOP_NS + moved * _FLOAT_NS


def _frozen_convolution(
    emit: Emitter,
    out: Spec,
    x: Value,
    weight: Value,
    bias: Value | None,
    *settings: Any,
) -> Value:
    by_columns = functools.partial(convolved, emit, out, x, weight, bias, *settings)
    # Beside depthwise convolutions, maps stay in planes, and other convolutions have single taps.
    if emit.keeps_planes or x.rank != 4:
        return by_columns()
    geometry = Convolution(*settings).geometry(x.shape[2:], weight, out.shape[2:])
    outputs, inputs = weight.shape[:2]
    whole_x = emit.full(x)
    by_runtime = functools.partial(runtime_conv, emit, out, whole_x, weight, geometry, groups=1)
    ways: list[_Way] = [
        (_columns_ns(geometry, inputs, outputs), by_columns),
        (_runtime_ns(geometry, whole_x, outputs), by_runtime),
    ]
    if fits_winograd(geometry):
        for size in SIZES:
            tiling = Tiling(geometry, size)
            by_tiles = functools.partial(winograd, emit, out, whole_x, weight, tiling)
            ways.append((_tiles_ns(tiling, inputs, outputs), by_tiles))
    # Ties go to the first.
    _cost, cheapest = min(ways, key=lambda way: way[0])
    if cheapest is by_columns:
        return by_columns()
    return with_bias(emit, cheapest(), bias)


LOWERINGS: dict[Any, Callable[..., Any]] = {
    torch.ops.shoal.frozen_convolution.default: _frozen_convolution,
}
