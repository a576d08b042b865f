"""Lowerings of average pooling and of its gradient, channels-last."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fleet_protocol.errors import ExportError
from trainer_export.lowering.covered import Covered, crop, uncrop
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.rules.elementwise import multiply
from trainer_export.lowering.values import Spec, Value, channels_last
from trainer_export.lowering.windows import mean_window

aten = torch.ops.aten


def _average_pool(emit: Emitter, out: Spec, x: Value, *settings: Any) -> Value:
    # The sum over a window times 1 / members: windows become separate axes, which one reduction
    # sums.
    size, members = _tiling_of_average(settings)
    whole_x = emit.full(x)
    covered = crop(emit, whole_x, size)
    opened_sizes = emit.ints(
        -1,
        *_open_windows(covered.sizes, size),
        x.shape[1],
    )
    opened = emit.node("Reshape", covered.name, opened_sizes)
    window_axes = emit.ints(
        *range(
            2,
            2 * len(size) + 1,
            2,
        )
    )
    total = emit.node("ReduceSum", opened, window_axes, keepdims=0)
    return multiply(
        emit,
        emit.value(total, out.shape, order=covered.order),
        1 / members,
    )


def _tiling_of_average(settings: Sequence[Any]) -> tuple[tuple[int, ...], int]:
    """Return the sizes of the window, and the divisor of its sum."""
    window, _ = mean_window(*settings)
    if not window.is_tiling:
        raise ExportError(
            "average pooling with overlapping or padded windows cannot be exported; use stride ="
            " kernel size"
        )
    return window.size, math.prod(window.size)


def _open_windows(sizes: Sequence[int], kernel: Sequence[int]) -> list[int]:
    """Return spatial sizes with separate axes for windows: windows, members, windows, ..."""
    opened = []
    for size, k in zip(sizes, kernel, strict=True):
        opened += [size // k, k]
    return opened


def _average_pool_backward(
    emit: Emitter,
    out: Spec,
    grad: Value,
    x: Value,
    *settings: Any,
) -> Value:
    # dx is dy / members at every member of a window: a broadcast along the axes of the windows.
    size, members = _tiling_of_average(settings)
    order = channels_last(x.rank)
    sizes = tuple(full // k * k for full, k in zip(x.shape[2:], size, strict=True))
    whole_grad = emit.full(grad)
    share = multiply(emit, whole_grad, 1 / members)
    opened = _open_windows(sizes, size)
    closed = list(opened)
    closed[1::2] = [1] * len(size)
    name = emit.arranged(share, order)
    closed_sizes = emit.ints(-1, *closed, x.shape[1])
    name = emit.node("Reshape", name, closed_sizes)
    opened_sizes = emit.ints(1, *opened, 1)
    wide = emit.node("Expand", name, opened_sizes)
    return uncrop(emit, Covered(wide, order, sizes), out)


LOWERINGS: dict[Any, Callable[..., Any]] = {
    aten.avg_pool2d.default: _average_pool,
    aten.avg_pool2d_backward.default: _average_pool_backward,
}
