"""Lowerings of max pooling and its gradient, channels-last or in planes, without scatter.

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

import torch

from trainer_export.lowering.covered import Covered, cover, uncrop
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.values import Spec, Value, planes
from trainer_export.lowering.windows import Window, spread

aten = torch.ops.aten


@dataclass(frozen=True)
class _Stage:
    """One axis of a pooling: members of the windows along it and their maximum."""

    members: tuple[str, ...]  # `size` ONNX values [.., 1, inner]
    running: tuple[str, ...]  # the maximum of the first 1, 2, ... members
    inner: int  # contiguous numbers of one element of the axis


def _stage(emit: Emitter, name: str, size: int, inner: int) -> _Stage:
    """Separate windows of ``size`` along an axis whose elements are runs of ``inner`` numbers."""
    row_sizes = emit.ints(-1, size, inner)
    rows = emit.node("Reshape", name, row_sizes)
    sizes = emit.ints(*[1] * size)
    members = emit.nodes("Split", rows, sizes, outputs=size, attributes={"axis": 1})
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


def _stages(emit: Emitter, x: Value, kernel: tuple[int, ...]) -> tuple[list[_Stage], Covered]:
    """Return the stages of a pooling, the last axis first, and their input."""
    covered = cover(emit, x, kernel)
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
        pooled = Covered(
            stages[-1].running[-1],
            covered.order,
            out[0].shape[2:],
        )
        return uncrop(emit, pooled, out[0]), None
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
    return uncrop(emit, replace(covered, name=name), out)


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


LOWERINGS: dict[Any, Callable[..., Any]] = {
    aten.max_pool2d_with_indices.default: _max_pool,
    aten.max_pool2d_with_indices_backward.default: _max_pool_backward,
}
