"""Lowerings of pooling and its gradient, channels-last or in planes, without scatter.

Max pooling with adjacent windows works on one axis at a time: Split separates the members of the
windows (for channels-last maps, whole rows of channels), they are compared, and the gradient
follows the comparisons back. The last spatial axis comes first and an earlier member wins ties.
This selects the first maximum in PyTorch's scan order. Equal maxima are common, because equal
patches of an image give equal activations.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fleet_protocol.errors import ExportError
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.rules.elementwise import multiply
from trainer_export.lowering.values import Spec, Value, channels_last, planes, reorder
from trainer_export.lowering.windows import Window, mean_window, spread

aten = torch.ops.aten


@dataclass(frozen=True)
class _Stage:
    """One axis of a pooling: members of the windows along it and their maximum."""

    members: tuple[str, ...]  # `size` ONNX values [.., 1, inner]
    running: tuple[str, ...]  # the maximum of the first 1, 2, ... members
    inner: int  # contiguous numbers of one element of the axis


@dataclass(frozen=True)
class _Covered:
    """The part of a feature map that windows cover.

    Attributes:
        name: the ONNX value.
        order: its physical axis order.
        sizes: its spatial sizes.
    """

    name: str
    order: tuple[int, ...]
    sizes: tuple[int, ...]


def _stage(emit: Emitter, name: str, size: int, inner: int) -> _Stage:
    """Separate windows of ``size`` along an axis whose elements are runs of ``inner`` numbers."""
    row_sizes = emit.ints(-1, size, inner)
    rows = emit.node("Reshape", name, row_sizes)
    members = emit.nodes("Split", rows, outputs=size, attributes={"axis": 1, "num_outputs": size})
    running = [members[0]]
    for member in members[1:]:
        running.append(emit.node("Max", running[-1], member))
    return _Stage(members, tuple(running), inner)


def _unstage(emit: Emitter, grad: str, stage: _Stage) -> str:
    """Route a gradient to the members that were the first maximum, joined as before.

    From the last member to the first: a member takes the gradient if it exceeds the maximum of all
        members before it.
    """
    shares: list[str] = []
    for member, before in zip(stage.members[:0:-1], stage.running[-2::-1], strict=True):
        difference = emit.node("Sub", member, before)
        # A step function, 1 above 0 and 0 at 0, by the largest slope of a float.
        wins = emit.node("HardSigmoid", difference, alpha=3e38, beta=0.0)
        share = emit.node("Mul", grad, wins)
        shares.append(share)
        grad = emit.node("Sub", grad, share)
    return emit.node("Concat", grad, *reversed(shares), axis=1)


def _cropped(emit: Emitter, x: Value, kernel: tuple[int, ...]) -> _Covered:
    """Return the part of a feature map that windows cover, channels-last."""
    order = channels_last(x.rank)
    name = emit.arranged(x, order)
    sizes = tuple(size // k * k for size, k in zip(x.shape[2:], kernel, strict=True))
    if sizes == x.shape[2:]:
        return _Covered(name, order, sizes)
    # One look-up of rows of channels, where a slice per axis would copy twice.
    positions = math.prod(x.shape[2:])
    table = np.arange(positions, dtype=np.int64).reshape(x.shape[2:])
    kept = table[tuple(slice(size) for size in sizes)]
    row_sizes = emit.ints(-1, positions, x.shape[1])
    rows = emit.node("Reshape", name, row_sizes)
    index = emit.constant(np.ascontiguousarray(kept).reshape(-1))
    cropped = emit.node("Gather", rows, index, axis=1)
    return _Covered(cropped, order, sizes)


def _covered(emit: Emitter, x: Value, kernel: tuple[int, ...]) -> _Covered:
    """Return the covered part, in planes if the map is in planes and fully covered."""
    order = planes(x.rank)
    whole = not any(size % k for size, k in zip(x.shape[2:], kernel, strict=True))
    if x.lies(order) and whole:
        in_planes = emit.arranged(x, order)
        return _Covered(in_planes, order, x.shape[2:])
    return _cropped(emit, x, kernel)


def _stages(emit: Emitter, x: Value, kernel: tuple[int, ...]) -> tuple[list[_Stage], _Covered]:
    """Return the stages of a pooling, the last axis first, and their input."""
    covered = _covered(emit, x, kernel)
    name = covered.name
    # Channels-last, an element of the last spatial axis is a row of channels; in planes a number.
    inner = 1 if covered.order == planes(x.rank) else x.shape[1]
    stages = []
    for axis in reversed(range(len(kernel))):
        stage = _stage(emit, name, kernel[axis], inner)
        name = stage.running[-1]
        stages.append(stage)
        inner *= covered.sizes[axis] // kernel[axis]
    return stages, covered


def _max_pool(
    emit: Emitter,
    out: Sequence[Spec],
    x: Value,
    *settings: Any,
) -> tuple[Value | None, ...]:
    # The maximum over a window, one axis after the other. No indices then, and the gradient
    # compares again; windows that overlap or are padded go to the runtime's operator.
    window = Window(*settings)
    x = emit.full(x)
    if window.is_tiling:
        stages, covered = _stages(emit, x, window.size)
        pooled = _Covered(
            stages[-1].running[-1],
            covered.order,
            out[0].shape[2:],
        )
        return _uncropped(emit, pooled, out[0]), None
    attributes = {
        **window.attributes,
        "dilations": spread(window.dilation, 2),
        "ceil_mode": 0,
    }
    if window.ceil_mode:
        attributes["pads"] = _pads_of_ceil(window, x, out[0])
    plain_x = emit.in_logical_order(x)
    names = emit.nodes("MaxPool", plain_x, outputs=2, attributes=attributes)
    return emit.value(names[0], out[0].shape), emit.value(
        names[1],
        out[1].shape,
        torch.int64,
    )


def _pads_of_ceil(window: Window, x: Value, out: Spec) -> list[int]:
    """Return the padding that covers the last window.

    It replaces ceil_mode, for which onnxruntime 1.19 computes one row too many.
    """
    begin = spread(window.padding, 2)
    dilation = spread(window.dilation, 2)
    end = []
    for axis, size in enumerate(x.shape[2:]):
        last_start = (out.shape[2 + axis] - 1) * window.steps[axis]
        span = dilation[axis] * (window.size[axis] - 1)
        reach = last_start + span + 1 - size
        end.append(max(0, reach - begin[axis]))
    return [*begin, *end]


def _max_pool_backward(
    emit: Emitter,
    out: Spec,
    grad: Value,
    x: Value,
    *settings_and_indices: Any,
) -> Value:
    # dx is dy at the first maximum of each window and 0 elsewhere. Without indices the stages of
    # the forward pass, which are the same nodes, are undone in reverse.
    *settings, indices = settings_and_indices
    if indices is not None:
        return _scattered(emit, out, grad, indices)
    x = emit.full(x)
    stages, covered = _stages(emit, x, Window(*settings).size)
    name = emit.arranged(grad, covered.order)
    for stage in reversed(stages):
        row_sizes = emit.ints(-1, 1, stage.inner)
        rows = emit.node("Reshape", name, row_sizes)
        name = _unstage(emit, rows, stage)
    return _uncropped(emit, replace(covered, name=name), out)


def _uncropped(emit: Emitter, covered: _Covered, out: Spec) -> Value:
    """Return the covered part as a feature map, with zeros outside it."""
    order = covered.order
    logical = (-1, out.shape[1], *covered.sizes)
    sizes = emit.ints(*reorder(logical, order))
    name = emit.node("Reshape", covered.name, sizes)
    uncovered = []
    for full, size in zip(out.shape[2:], covered.sizes, strict=True):
        uncovered.append(full - size)
    missing = (0, 0, *uncovered)
    if any(missing):
        pads = emit.ints(*[0] * len(order), *reorder(missing, order))
        name = emit.node("Pad", name, pads)
    return emit.value(name, out.shape, order=order)


def _scattered(emit: Emitter, out: Spec, grad: Value, indices: Value) -> Value:
    """Return the gradient of windows of any kind.

    Each number is added to the element that its maximum came from, whose index counts over the
    whole batch.
    """
    count = emit.shape_tensor((math.prod(out.shape),))
    one_size = emit.ints(1)
    total = emit.node("Reshape", count, one_size)
    zero = emit.scalar(0, torch.float32)
    zeros = emit.node("Expand", zero.name, total)
    flat = []
    for value in (indices, grad):
        plain_value = emit.in_logical_order(value)
        flat_size = emit.ints(-1)
        flat.append(emit.node("Reshape", plain_value, flat_size))
    summed = emit.node("ScatterElements", zeros, *flat, axis=0, reduction="add")
    map_sizes = emit.ints(-1, *out.shape[1:])
    name = emit.node("Reshape", summed, map_sizes)
    return emit.value(name, out.shape)


def _average_pool(emit: Emitter, out: Spec, x: Value, *settings: Any) -> Value:
    # The sum over a window times 1 / members: windows become separate axes, which one reduction #
    # sums.
    size, members = _tiling_of_average(settings)
    whole_x = emit.full(x)
    covered = _cropped(emit, whole_x, size)
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
    return _uncropped(emit, _Covered(wide, order, sizes), out)


LOWERINGS: dict[Any, Callable[..., Any]] = {
    aten.max_pool2d_with_indices.default: _max_pool,
    aten.max_pool2d_with_indices_backward.default: _max_pool_backward,
    aten.avg_pool2d.default: _average_pool,
    aten.avg_pool2d_backward.default: _average_pool_backward,
}
