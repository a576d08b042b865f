"""Lowering of convolutions and their gradients to look-ups and matrix products, channels-last.

The runtime's own Conv is fast on images and slow on the small, deep feature maps where a step spends its time: 18 ms
against 4.5 for 128 -> 256 channels at 7x7, batch 32, two cores, and its weight gradient as a convolution takes 23.
Channels-last, the columns of a convolution are whole rows of channels, so one Gather with a constant table copies them
in parallel, and forward, weight gradient and input gradient are each one Gemm near the peak of the machine. Any
stride, padding, dilation and number of spatial dimensions is only another table.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fleet_protocol.errors import ExportError
from trainer_export.emitter import Emitter
from trainer_export.values import Spec, Value, channels_last

__all__ = ["LOWERINGS", "Geometry"]

aten = torch.ops.aten

# Nanoseconds, measured on two cores of an x86-64 server; only their ratios matter.
_ROW_NS, _FLOAT_NS, _FLOP_NS, _TRANSPOSE_NS = 3.7, 0.06, 0.005, 0.25
_SLICE_ROW_NS, _SLICE_FLOAT_NS = 6.0, 0.2
_TRANSPOSED_NS, _TRANSPOSED_FLOP_NS = 15.0, 0.015


@dataclass(frozen=True)
class Geometry:
    """The static shape of a convolution.

    Attributes:
        inputs: spatial sizes of the input.
        outputs: spatial sizes of the output.
        kernel: sizes of the kernel.
        stride: steps of the window.
        padding: zeros before and after each spatial dimension.
        dilation: distance of the kernel's taps.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def taps(self) -> int:
        """Number of weights per pair of channels."""
        return math.prod(self.kernel)

    @property
    def is_pointwise(self) -> bool:
        """Whether every output sees one input, at its own place."""
        return self.taps == 1 and self.inputs == self.outputs

    def table(self) -> NDArray[np.int64]:
        """For each output and tap the flat input position it reads, or the number of positions for a zero."""
        return self._positions(
            self.outputs,
            self.inputs,
            lambda axis, output, tap: (
                output * self.stride[axis] + tap * self.dilation[axis] - self.padding[axis],
                1,
            ),
        )

    def reverse_table(self) -> NDArray[np.int64]:
        """For each input and tap the flat output position that reads it there, or the number of positions."""
        return self._positions(
            self.inputs,
            self.outputs,
            lambda axis, place, tap: (
                place + self.padding[axis] - tap * self.dilation[axis],
                self.stride[axis],
            ),
        )

    def _positions(
        self,
        here: tuple[int, ...],
        there: tuple[int, ...],
        place: Callable[[int, NDArray[np.int64], NDArray[np.int64]], tuple[NDArray[np.int64], int]],
    ) -> NDArray[np.int64]:
        """Flat positions in ``there``, int64 [prod(here), taps]; outside or between steps: ``prod(there)``."""
        rank = len(here)
        flat = np.zeros((1,) * (2 * rank), np.int64)
        valid = np.ones_like(flat, bool)
        for axis, size in enumerate(there):
            shape = [1] * (2 * rank)
            shape[axis] = here[axis]
            places = np.arange(here[axis]).reshape(shape)
            shape = [1] * (2 * rank)
            shape[rank + axis] = self.kernel[axis]
            taps = np.arange(self.kernel[axis]).reshape(shape)
            scaled, step = place(axis, places, taps)
            index = scaled // step
            valid = valid & (scaled % step == 0) & (index >= 0) & (index < size)
            flat = flat * size + np.clip(index, 0, size - 1)
        full = np.broadcast_to(np.where(valid, flat, math.prod(there)), (*here, *self.kernel))
        return full.reshape(math.prod(here), self.taps)


def _geometry(
    x: Value,
    weight: Value,
    out: Sequence[Any],
    settings: tuple[Sequence[int], Sequence[int], Sequence[int], bool],
) -> Geometry:
    stride, padding, dilation, transposed = settings
    if transposed:
        raise ExportError("a transposed convolution cannot be exported; use Upsample followed by a convolution")
    spatial = (*x.shape[2:], *out)
    if not all(isinstance(size, int) for size in spatial):
        raise ExportError("a convolution over a dimension that depends on the batch cannot be exported")
    rank = x.rank - 2
    spread = [tuple(s) * rank if len(s) == 1 else tuple(s) for s in (stride, padding, dilation)]
    return Geometry(x.shape[2:], tuple(out), weight.shape[2:], *spread)


def _rows(e: Emitter, x: Value, *, zero_row: bool) -> str:
    """A feature map as [batch, positions, channels], with one row of zeros at the end if wanted."""
    positions, channels = math.prod(x.shape[2:]), x.shape[1]
    name = e.arranged(x, channels_last(x.rank))
    physical = (x.shape[0], *x.shape[2:], channels)
    rows = e.reshaped(name, physical, (x.shape[0], positions, channels))
    return e.graph.node("Pad", rows, e.graph.ints(0, 0, 0, 0, 1, 0)) if zero_row else rows


def _look_up(e: Emitter, x: Value, table: NDArray[np.int64]) -> str:
    """The rows of ``x`` that the table names, as a matrix [batch * len(table), taps * channels]."""
    zero_row = bool((table == math.prod(x.shape[2:])).any())
    rows = _rows(e, x, zero_row=zero_row)
    columns = e.graph.node("Gather", rows, e.graph.constant(table.reshape(-1)), axis=1)
    return e.graph.node("Reshape", columns, e.graph.ints(-1, table.shape[1] * x.shape[1]))


def _look_up_ns(rows: int, taps: int, channels: int) -> float:
    return rows * taps * (_ROW_NS + _FLOAT_NS * channels)


@dataclass(frozen=True)
class _Columns:
    """What each output sees.

    Attributes:
        name: a matrix [batch * outputs, taps * channels], or its transpose.
        transposed: which of the two, as Gemm wants it.
    """

    name: str
    transposed: int


def _columns(e: Emitter, x: Value, geometry: Geometry) -> _Columns:
    """The columns of a convolution, taps before channels; equal nodes for forward pass and weight gradient."""
    channels = x.shape[1]
    if geometry.is_pointwise:
        return _Columns(_matrix_of(e, x), 0)
    row = geometry.outputs[-1]
    by_slices = channels * (geometry.taps * (_SLICE_ROW_NS / row + _SLICE_FLOAT_NS) + _TRANSPOSE_NS)
    if all(step == 1 for step in geometry.stride) and by_slices < _look_up_ns(1, geometry.taps, channels):
        return _Columns(_sliced(e, x, geometry), 1)
    return _Columns(_look_up(e, x, geometry.table()), 0)


def _sliced(e: Emitter, x: Value, geometry: Geometry) -> str:
    """The transposed columns as shifted copies of the whole input: few channels make short rows and long planes."""
    rank = x.rank
    order = (1, 0, *range(2, rank))
    plane = e.arranged(x, order)
    if any(geometry.padding):
        pads = (0, 0, *geometry.padding)
        plane = e.graph.node("Pad", plane, e.graph.ints(*pads, *pads))
    axes = e.graph.ints(*range(2, rank))
    shifted = []
    for tap in itertools.product(*map(range, geometry.kernel)):
        start = [t * d for t, d in zip(tap, geometry.dilation, strict=True)]
        stop = [begin + size for begin, size in zip(start, geometry.outputs, strict=True)]
        shifted.append(e.graph.node("Slice", plane, e.graph.ints(*start), e.graph.ints(*stop), axes))
    joined = e.graph.node("Concat", *shifted, axis=0)
    return e.graph.node("Reshape", joined, e.graph.ints(geometry.taps * x.shape[1], -1))


def _weight_matrix(e: Emitter, weight: Value) -> str:
    """The kernel as [outputs, taps * inputs]."""
    order = channels_last(weight.rank)
    physical = tuple(weight.shape[i] for i in order)
    return e.reshaped(e.arranged(weight, order), physical, (weight.shape[0], math.prod(physical[1:])))


def _dense(e: Emitter, weight: Value, groups: int) -> Value:
    """A grouped kernel as a full one with zeros; simple, and right for the few grouped layers small models have."""
    if groups == 1:
        return weight
    repeated = e.graph.node("Concat", *[e.plain(weight)] * groups, axis=1)
    shape = (weight.shape[0], weight.shape[1] * groups, *weight.shape[2:])
    return e.pointwise("Mul", e.value(repeated, shape), _group_mask(e, shape, groups))


def _group_mask(e: Emitter, shape: Sequence[int], groups: int) -> Value:
    mask = np.kron(np.eye(groups), np.ones((shape[0] // groups, shape[1] // groups))).astype(np.float32)
    wide = mask.reshape(*mask.shape, *([1] * (len(shape) - 2)))
    return e.value(e.graph.constant(wide), wide.shape)


def _sparse_gradient(e: Emitter, grad: Value, groups: int) -> Value:
    """The gradient of a grouped kernel from that of the full one."""
    if groups == 1:
        return grad
    outputs, inputs, *kernel = grad.shape
    masked = e.pointwise("Mul", grad, _group_mask(e, grad.shape, groups))
    split = e.view(masked, (outputs, groups, inputs // groups, *kernel))
    return e.reduce("ReduceSum", split, [1], keep=False)


def _convolution(
    e: Emitter,
    out: Spec,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Value:
    del output_padding
    geometry = _geometry(x, weight, out.shape[2:], (stride, padding, dilation, transposed))
    kernel = _weight_matrix(e, _dense(e, weight, groups))
    columns = _columns(e, e.full(x), geometry)
    inputs = [columns.name, kernel, *([e.plain(bias)] if bias is not None else [])]
    flat = e.graph.node("Gemm", *inputs, transA=columns.transposed, transB=1)
    return _feature_map(e, flat, out)


def _feature_map(e: Emitter, matrix: str, out: Spec) -> Value:
    """A matrix [batch * positions, channels] as the feature map of the given logical shape."""
    order = channels_last(len(out.shape))
    name = e.graph.node("Reshape", matrix, e.graph.ints(-1, *out.shape[2:], out.shape[1]))
    return e.value(name, out.shape, order=order)


def _convolution_backward(
    e: Emitter,
    out: Sequence[Spec | None],
    grad: Value,
    x: Value,
    weight: Value,
    bias_sizes: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    del bias_sizes, output_padding
    geometry = _geometry(x, weight, grad.shape[2:], (stride, padding, dilation, transposed))
    grad, x = e.full(grad), e.full(x)
    grad_x = grad_weight = grad_bias = None
    if mask[0]:
        spec = out[0]
        assert spec is not None
        grad_x = _input_gradient(e, spec, grad, _dense(e, weight, groups), geometry)
    if mask[1]:
        shape = (weight.shape[0], weight.shape[1] * groups, *weight.shape[2:])
        grad_weight = _sparse_gradient(e, _weight_gradient(e, grad, x, shape, geometry), groups)
    if mask[2]:
        grad_bias = e.reduce("ReduceSum", grad, [0, *range(2, grad.rank)], keep=False)
    return grad_x, grad_weight, grad_bias


def _weight_gradient(e: Emitter, grad: Value, x: Value, shape: Sequence[int], geometry: Geometry) -> Value:
    columns = _columns(e, x, geometry)
    flat = e.graph.node("Gemm", _matrix_of(e, grad), columns.name, transA=1, transB=columns.transposed)
    order = channels_last(len(shape))
    name = e.reshaped(flat, (shape[0], -1), tuple(shape[i] for i in order))
    return e.value(name, shape, order=order)


def _matrix_of(e: Emitter, x: Value) -> str:
    """A feature map as a matrix [batch * positions, channels]."""
    return e.graph.node("Reshape", _rows(e, x, zero_row=False), e.graph.ints(-1, x.shape[1]))


def _input_gradient(e: Emitter, out: Spec, grad: Value, weight: Value, geometry: Geometry) -> Value:
    """The gradient of the input, in the cheapest of three ways.

    Look up what each input contributed to and multiply; or multiply first and add up what belongs together; or leave
    it to the runtime. The first moves rows of output channels and multiplies for every input; the second moves rows of
    input channels and multiplies for every output; the third wins where channels are few.
    """
    outputs, inputs = weight.shape[:2]
    table = geometry.reverse_table()
    if geometry.is_pointwise:
        flat = e.graph.node("Gemm", _matrix_of(e, grad), _weight_matrix(e, weight))
        return _feature_map(e, flat, out)
    places, results, taps = math.prod(geometry.inputs), math.prod(geometry.outputs), geometry.taps
    flops = 2 * taps * inputs * outputs
    reach = int((table < results).sum(1).max())
    first = places * (_look_up_ns(1, taps, outputs) + flops * _FLOP_NS)
    second = results * (flops * _FLOP_NS + taps * inputs * 0.2) + places * (
        _look_up_ns(1, reach, inputs) + reach * inputs * 0.1
    )
    transposed = results * (_TRANSPOSED_NS + flops * _TRANSPOSED_FLOP_NS)
    if transposed <= min(first, second):
        return _transposed_convolution(e, out, grad, weight, geometry)
    if first <= second:
        order = (*range(2, weight.rank), 0, 1)
        physical = tuple(weight.shape[i] for i in order)
        kernel = e.reshaped(e.arranged(weight, order), physical, (taps * outputs, inputs))
        return _feature_map(e, e.graph.node("Gemm", _look_up(e, grad, table), kernel), out)
    products = e.graph.node("Gemm", _matrix_of(e, grad), _weight_matrix(e, weight))
    rows = e.graph.node("Reshape", products, e.graph.ints(-1, results * taps, inputs))
    gathered = _contributions(e, rows, table, results, reach)
    summed = e.graph.node(
        "ReduceSum",
        e.graph.node("Reshape", gathered, e.graph.ints(-1, reach, inputs)),
        e.graph.ints(1),
        keepdims=0,
    )
    return _feature_map(e, summed, out)


def _transposed_convolution(e: Emitter, out: Spec, grad: Value, weight: Value, geometry: Geometry) -> Value:
    """The runtime's own operator, faster where channels are few."""
    extra = [
        size - ((count - 1) * step - 2 * pad + spread * (k - 1) + 1)
        for size, count, step, pad, spread, k in zip(
            geometry.inputs,
            geometry.outputs,
            geometry.stride,
            geometry.padding,
            geometry.dilation,
            geometry.kernel,
            strict=True,
        )
    ]
    name = e.graph.node(
        "ConvTranspose",
        e.plain(grad),
        e.plain(weight),
        kernel_shape=list(geometry.kernel),
        strides=list(geometry.stride),
        pads=list(geometry.padding) * 2,
        dilations=list(geometry.dilation),
        output_padding=extra,
    )
    return e.value(name, out.shape)


def _contributions(e: Emitter, rows: str, table: NDArray[np.int64], results: int, reach: int) -> str:
    """For each input the ``reach`` products [output, tap] it takes part in, zeros where there are fewer."""
    taps = table.shape[1]
    zero = results * taps
    index = np.where(table < results, table * taps + np.arange(taps), zero)
    index = np.sort(index, axis=1)[:, :reach]  # the row of zeros has the largest number
    if (index == zero).any():
        rows = e.graph.node("Pad", rows, e.graph.ints(0, 0, 0, 0, 1, 0))
    return e.graph.node("Gather", rows, e.graph.constant(index.reshape(-1)), axis=1)


LOWERINGS: dict[Any, Callable[..., Any]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}
