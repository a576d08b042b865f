"""Lowering of convolutions, in the cheapest of three ways if a step has frozen parameters.

The first is the product with columns, which all other graphs use. The second is Winograd's
algorithm, for 3x3 kernels. The third is the runtime's own operator, which is the fastest on images,
whose few channels make many short columns.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from trainer_export.lowering.convolution_costs import columns_ns, runtime_ns, tiles_ns
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.rules.conv import convolved, with_bias
from trainer_export.lowering.runtime_conv import runtime_conv
from trainer_export.lowering.values import Spec, Value
from trainer_export.lowering.windows import Convolution
from trainer_export.lowering.winograd import tilings_of, winograd

_Way = tuple[float, Callable[[], Value]]


def _convolution(
    emit: Emitter,
    out: Spec,
    x: Value,
    weight: Value,
    bias: Value | None,
    *settings: Any,
) -> Value:
    by_columns = functools.partial(convolved, emit, out, x, weight, bias, *settings)
    convolution = Convolution(*settings)
    # Beside depthwise convolutions, maps stay in planes, and other convolutions have single taps.
    is_free = emit.free_order and not emit.keeps_planes and x.rank == 4
    if not is_free or convolution.transposed or convolution.groups > 1:
        return by_columns()
    geometry = convolution.geometry(x.shape[2:], weight, out.shape[2:])
    outputs, inputs = weight.shape[:2]
    whole_x = emit.full(x)
    by_runtime = functools.partial(runtime_conv, emit, out, whole_x, weight, geometry, groups=1)
    ways: list[_Way] = [
        (columns_ns(geometry, inputs, outputs), by_columns),
        (runtime_ns(geometry, whole_x, outputs), by_runtime),
    ]
    for tiling in tilings_of(geometry):
        by_tiles = functools.partial(winograd, emit, out, whole_x, weight, tiling)
        ways.append((tiles_ns(tiling, inputs, outputs), by_tiles))
    # Ties go to the first.
    _cost, cheapest = min(ways, key=lambda way: way[0])
    if cheapest is by_columns:
        return by_columns()
    return with_bias(emit, cheapest(), bias)


LOWERINGS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.convolution.default: _convolution,
}
