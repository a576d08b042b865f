"""Lowerings of pooling and its gradient, channels-last or in planes, without the scatter of
indices.

Max-pooling by windows that touch and do not overlap is done one axis at a time: the windows'
members are separated by Split (of channels-last maps whole rows of channels), compared, and the
gradient is sent back through the comparisons. The last spatial axis comes first and an earlier
member wins ties, which is the first maximum in the order PyTorch scans a window in: equal maxima
are common, because equal patches of an image give equal activations.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fleet_protocol.errors import ExportError
from trainer_export.lowering.emitter import Emitter
from trainer_export.lowering.rules.elementwise import multiply
from trainer_export.lowering.values import Spec, Value, channels_last, planes
from trainer_export.lowering.windows import Window, mean_window, spread

aten = torch.ops.aten


@dataclass(frozen=True)
class _Stage:
    """One axis of a pooling: members of the windows along it and their maximum."""

    members: tuple[str, ...]  # `size` ONNX values [.., 1, inner]
    running: tuple[str, ...]  # the maximum of the first 1, 2, ... members
    inner: int  # numbers in a run that belongs to one element of the axis


def _stage(emit: Emitter, name: str, size: int, inner: int) -> _Stage:
    """Separate windows of ``size`` along an axis whose elements are runs of ``inner`` numbers."""
    rows = emit.graph.node("Reshape", name, emit.graph.ints(-1, size, inner))
    members = emit.graph.nodes(
        "Split", rows, outputs=size, attributes={"axis": 1, "num_outputs": size}
    )
    running = [members[0]]
    for member in members[1:]:
        running.append(emit.graph.node("Max", running[-1], member))
    return _Stage(members, tuple(running), inner)


def _unstage(emit: Emitter, grad: str, stage: _Stage) -> str:
    """Send a gradient back to the members that were the first maximum, joined as they were
    separated.
    """
    parts: list[str] = []
    for member, before in zip(stage.members[:0:-1], stage.running[-2::-1], strict=True):
        wins = emit.graph.node(
            "HardSigmoid", emit.graph.node("Sub", member, before), alpha=3e38, beta=0.0
        )
        taken = emit.graph.node("Mul", grad, wins)
        parts.append(taken)
        grad = emit.graph.node("Sub", grad, taken)
    return emit.graph.node("Concat", grad, *reversed(parts), axis=1)


def _cropped(emit: Emitter, x: Value, kernel: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """The part of a feature map that windows cover, channels-last, and its spatial sizes."""
    name = emit.arranged(x, channels_last(x.rank))
    sizes = tuple(size // k * k for size, k in zip(x.shape[2:], kernel, strict=True))
    if sizes == x.shape[2:]:
        return name, sizes
    table = np.arange(math.prod(x.shape[2:]), dtype=np.int64).reshape(x.shape[2:])
    table = table[tuple(slice(size) for size in sizes)]
    rows = emit.graph.node("Reshape", name, emit.graph.ints(-1, math.prod(x.shape[2:]), x.shape[1]))
    return emit.graph.node(
        "Gather",
        rows,
        emit.graph.constant(np.ascontiguousarray(table).reshape(-1)),
        axis=1,
    ), sizes


def _stages(
    emit: Emitter, x: Value, kernel: tuple[int, ...]
) -> tuple[list[_Stage], tuple[int, ...], tuple[int, ...]]:
    """The stages of a pooling, the order that it works in, and the spatial sizes that its windows
    cover.
    """
    order = planes(x.rank)
    inner = 1
    if x.lies(order) and not any(size % k for size, k in zip(x.shape[2:], kernel, strict=True)):
        name = emit.arranged(x, order)
        sizes = x.shape[2:]
    else:
        order, inner, (name, sizes) = (
            channels_last(x.rank),
            x.shape[1],
            _cropped(emit, x, kernel),
        )
    stages = []
    for axis in reversed(range(len(kernel))):
        stage = _stage(emit, name, kernel[axis], inner)
        name = stage.running[-1]
        stages.append(stage)
        inner *= sizes[axis] // kernel[axis]
    return stages, order, sizes


def _max_pool(
    emit: Emitter, out: Sequence[Spec], x: Value, *settings: Any
) -> tuple[Value | None, ...]:
    window = Window(*settings)
    x = emit.full(x)
    if window.is_tiling:
        stages, order, _ = _stages(emit, x, window.size)
        return _uncropped(emit, stages[-1].running[-1], out[0], out[0].shape[2:], order), None
    attributes = {
        **window.attributes,
        "dilations": spread(window.dilation, 2),
        "ceil_mode": 0,
    }
    if (
        window.ceil_mode
    ):  # of which onnxruntime 1.19 makes a row too many: padded as far as the last window goes
        ends = zip(
            x.shape[2:],
            out[0].shape[2:],
            window.size,
            window.steps,
            attributes["dilations"],
            strict=True,
        )
        reach = [
            (n - 1) * step + spacing * (k - 1) + 1 - size for size, n, k, step, spacing in ends
        ]
        begin = spread(window.padding, 2)
        attributes["pads"] = [
            *begin,
            *(max(0, far - pad) for far, pad in zip(reach, begin, strict=True)),
        ]
    names = emit.graph.nodes("MaxPool", emit.plain(x), outputs=2, attributes=attributes)
    return emit.value(names[0], out[0].shape), emit.value(names[1], out[1].shape, torch.int64)


def _max_pool_backward(emit: Emitter, out: Spec, grad: Value, x: Value, *rest: Any) -> Value:
    *settings, indices = rest
    if indices is not None:
        return _scattered(emit, out, grad, indices)
    x = emit.full(x)
    stages, order, sizes = _stages(emit, x, Window(*settings).size)
    name = emit.arranged(grad, order)
    for stage in reversed(stages):
        name = _unstage(
            emit, emit.graph.node("Reshape", name, emit.graph.ints(-1, 1, stage.inner)), stage
        )
    return _uncropped(emit, name, out, sizes, order)


def _uncropped(
    emit: Emitter, name: str, out: Spec, sizes: tuple[int, ...], order: tuple[int, ...]
) -> Value:
    """What lies in an order as a feature map, with zeros for what no window covers."""
    covered = (-1, out.shape[1], *sizes)
    name = emit.graph.node("Reshape", name, emit.graph.ints(*(covered[axis] for axis in order)))
    missing = (
        0,
        0,
        *(full - size for full, size in zip(out.shape[2:], sizes, strict=True)),
    )
    if any(missing):
        name = emit.graph.node(
            "Pad",
            name,
            emit.graph.ints(*[0] * len(order), *(missing[axis] for axis in order)),
        )
    return emit.value(name, out.shape, order=order)


def _scattered(emit: Emitter, out: Spec, grad: Value, indices: Value) -> Value:
    """The general case: add each gradient to the element its maximum came from (flat indices over
    the whole batch).
    """
    total = emit.graph.node(
        "Reshape", emit.shape_tensor((math.prod(out.shape),)), emit.graph.ints(1)
    )
    zeros = emit.graph.node("Expand", emit.scalar(0, torch.float32).name, total)
    flat = [emit.graph.node("Reshape", emit.plain(v), emit.graph.ints(-1)) for v in (indices, grad)]
    name = emit.graph.node("ScatterElements", zeros, *flat, axis=0, reduction="add")
    return emit.value(
        emit.graph.node("Reshape", name, emit.graph.ints(-1, *out.shape[1:])), out.shape
    )


def _average_pool(emit: Emitter, out: Spec, x: Value, *settings: Any) -> Value:
    size, members = _tiling_of_average(settings)
    name, sizes = _cropped(emit, emit.full(x), size)
    opened = emit.graph.node(
        "Reshape", name, emit.graph.ints(-1, *_open_windows(sizes, size), x.shape[1])
    )
    name = emit.graph.node(
        "ReduceSum", opened, emit.graph.ints(*range(2, 2 * len(size) + 1, 2)), keepdims=0
    )
    return multiply(emit, emit.value(name, out.shape, order=channels_last(x.rank)), 1 / members)


def _tiling_of_average(settings: Sequence[Any]) -> tuple[tuple[int, ...], int]:
    """Sizes of the window, and what its sum is divided by."""
    window, _ = mean_window(*settings)
    if not window.is_tiling:
        raise ExportError(
            "average pooling with overlapping or padded windows cannot be exported; use stride = kernel size"
        )
    return window.size, math.prod(window.size)


def _open_windows(sizes: Sequence[int], kernel: Sequence[int]) -> list[int]:
    return [n for size, k in zip(sizes, kernel, strict=True) for n in (size // k, k)]


def _average_pool_backward(
    emit: Emitter, out: Spec, grad: Value, x: Value, *settings: Any
) -> Value:
    size, members = _tiling_of_average(settings)
    sizes = tuple(s // k * k for s, k in zip(x.shape[2:], size, strict=True))
    share = multiply(emit, emit.full(grad), 1 / members)
    closed = [n for s, k in zip(sizes, size, strict=True) for n in (s // k, 1)]
    name = emit.graph.node(
        "Reshape",
        emit.arranged(share, channels_last(x.rank)),
        emit.graph.ints(-1, *closed, x.shape[1]),
    )
    wide = emit.graph.node("Expand", name, emit.graph.ints(1, *_open_windows(sizes, size), 1))
    return _uncropped(emit, wide, out, sizes, channels_last(x.rank))


LOWERINGS: dict[Any, Callable[..., Any]] = {
    aten.max_pool2d_with_indices.default: _max_pool,
    aten.max_pool2d_with_indices_backward.default: _max_pool_backward,
    aten.avg_pool2d.default: _average_pool,
    aten.avg_pool2d_backward.default: _average_pool_backward,
}
