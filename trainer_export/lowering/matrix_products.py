"""Convolution, pooling and their gradients as slices, paddings and matrix products.

For runtimes that are slow or wrong at them. A convolution lays the places that its kernel looks at
under one another (im2col) and is one matrix product; its gradient reads the same slices, and adds
what belongs to one place. Batch and channels change places meanwhile, so that one product is over
all samples. All sizes are numbers. The portable graphs have `rules.conv` and `groups` instead,
which write operators of ONNX and choose among ways.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fleet_protocol.errors import ExportError
from trainer_export import pointwise_norms  # noqa: F401 - registers shoal::pointwise_norm
from trainer_export.operators import static_batch_norm, static_batch_norm_backward

aten = torch.ops.aten

_LOWEST = -3e38  # what padding never wins a maximum with
_STEEP = 1e38  # a slope that brings the least normal number to 1


@dataclass(frozen=True)
class _Window:
    """What a kernel looks at: height and width of each."""

    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    def slices(self, x: Tensor, fill: float = 0.0) -> list[Tensor]:
        """Return for each place of the kernel what it meets, [..., height, width] of the output."""
        top, left = self.padding
        if top or left:
            x = aten.constant_pad_nd(x, [left, left, top, top], fill)
        # Columns first: they are cut once for all rows of the kernel.
        by_column = []
        for place in range(self.kernel[1]):
            by_column.append(self._run(x, 1, place))
        slices = []
        for row in range(self.kernel[0]):
            for column in by_column:
                slices.append(self._run(column, 0, row))
        return slices

    def add_slices(self, slices: Sequence[Tensor], size: Sequence[int]) -> Tensor:
        """Return the gradient of `slices`: those that met the same place are added.

        Args:
            slices: one for each place of the kernel.
            size: height and width of the input.
        """
        height, width = (n + 2 * p for n, p in zip(size, self.padding, strict=True))
        columns = []
        for column in range(self.kernel[1]):
            columns.append(self._added(slices[column :: self.kernel[1]], 0, height))
        whole = self._added(columns, 1, width)
        for axis in (0, 1):
            if self.padding[axis]:
                whole = whole.narrow(axis - 2, self.padding[axis], size[axis])
        return whole

    def _run(self, x: Tensor, axis: int, place: int) -> Tensor:
        """Return what one place of the kernel meets along an axis."""
        step = self.stride[axis]
        size = x.shape[axis - 2]
        start = place * self.dilation[axis]
        count = (size - self.dilation[axis] * (self.kernel[axis] - 1) - 1) // step + 1
        end = start + (count - 1) * step + 1
        if end - start == size and step == 1:
            return x
        run: Tensor = aten.slice.Tensor(x, x.dim() + axis - 2, start, end, step)
        return run

    def _added(self, runs: Sequence[Tensor], axis: int, size: int) -> Tensor:
        """Return the sum of the gradients of `_run` for all places along an axis.

        They are added from the first on: the order is part of the result.
        """
        placed = []
        for place, run in enumerate(runs):
            placed.append(self._placed(run, axis, place, size))
        return functools.reduce(torch.add, placed)

    def _placed(self, x: Tensor, axis: int, place: int, size: int) -> Tensor:
        """Return the gradient of `_run`: zeros wherever it did not read."""
        step = self.stride[axis]
        count = x.shape[axis - 2]
        behind = [0, 0] * (1 - axis)
        if step > 1 and count > 1:  # zeros between the rows or columns
            apart = aten.constant_pad_nd(x.unsqueeze(axis - 2), [*behind, 0, step - 1], 0.0)
            x = apart.flatten(axis - 3, axis - 2).narrow(axis - 2, 0, (count - 1) * step + 1)
        start = place * self.dilation[axis]
        after = size - start - x.shape[axis - 2]
        if not start and not after:
            return x
        placed: Tensor = aten.constant_pad_nd(x, [*behind, start, after], 0.0)
        return placed


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """Return a product of two matrices that change, as a batch of one."""
    product: Tensor = aten.bmm(a.reshape(1, *a.shape), b.reshape(1, *b.shape))
    return product.reshape(a.shape[0], b.shape[1])


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = _mm(a, b) if alpha == 1 else _mm(a, b) * alpha
    return product + (bias if beta == 1 else bias * beta)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _columns(slices: Sequence[Tensor]) -> Tensor:
    """Return what all outputs see, [taps * channels, batch * positions]."""
    return _joined(slices).reshape(len(slices) * slices[0].shape[0], -1)


def _is_flat(x: Tensor, *, transposed: bool) -> bool:
    """Return whether a convolution has one dimension; it may have one or two."""
    if x.dim() > 4 or transposed:
        raise ExportError(
            "convolutions in three dimensions and transposed ones are not lowered to matrix"
            " products"
        )
    return x.dim() == 3


@dataclass(frozen=True)
class _Settings:
    """The settings of ``aten.convolution``, in its order."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    @property
    def with_height(self) -> tuple[Any, ...]:
        """Those of a convolution of one dimension as of two, with a height of 1."""
        return (
            [1, *self.stride],
            [0, *self.padding],
            [1, *self.dilation],
            self.transposed,
            self.output_padding,
            self.groups,
        )

    def window(self, kernel: Sequence[int]) -> _Window:
        """Return what a kernel of these sizes looks at."""
        return _Window(kernel, self.stride, self.padding, self.dilation)


def convolution(x: Tensor, w: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """Return ``aten.convolution``, of samples first: ``Y = W columns(X) + b`` for each group."""
    settings = _Settings(*options)
    if _is_flat(x, transposed=settings.transposed):
        wide = convolution(x.unsqueeze(2), w.unsqueeze(2), bias, *settings.with_height)
        return wide.squeeze(2)
    window = settings.window(w.shape[2:])
    products: list[Tensor] = []
    shape = torch.Size()
    inputs = x.transpose(0, 1).chunk(settings.groups)
    for group, kernel in zip(inputs, w.chunk(settings.groups), strict=True):
        slices = window.slices(group)
        columns = _columns(slices)
        matrix = kernel.permute(0, 2, 3, 1).reshape(kernel.shape[0], -1)
        products.append(_mm(matrix, columns))
        shape = slices[0].shape[1:]
    result = _joined(products)
    if bias is not None:
        result = result + bias.unsqueeze(1)
    return result.reshape(w.shape[0], *shape).transpose(0, 1)


def convolution_backward(
    grad: Tensor,
    x: Tensor,
    w: Tensor,
    *options: Any,
) -> tuple[Tensor | None, ...]:
    """Return ``aten.convolution_backward``.

    For each group ``dX`` adds the slices of ``W^T dY``, ``dW = columns(X) dY^T``; ``db`` is the sum
    of ``dY``. One that is not asked for is None.
    """
    _bias_shape, *own_options, wanted = options
    settings = _Settings(*own_options)
    if _is_flat(x, transposed=settings.transposed):
        return _flat_backward(grad, x, w, *options)
    window = settings.window(w.shape[2:])
    chunks = (
        x.transpose(0, 1).chunk(settings.groups),
        w.chunk(settings.groups),
        grad.transpose(0, 1).chunk(settings.groups),
    )
    by_channel = grad.transpose(0, 1).reshape(grad.shape[1], -1)
    to_x: list[Tensor] = []
    to_w: list[Tensor] = []
    for group, kernel, slope in zip(*chunks, strict=True):
        rows = slope.reshape(slope.shape[0], -1)
        if wanted[0]:
            matrix = kernel.permute(2, 3, 1, 0).reshape(-1, kernel.shape[0])
            columns = _mm(matrix, rows)
            taps = math.prod(w.shape[2:])
            slices = columns.reshape(taps, group.shape[0], *slope.shape[1:]).unbind()
            to_x.append(window.add_slices(slices, x.shape[2:]))
        if wanted[1]:
            product = _mm(_columns(window.slices(group)), rows.t())
            by_tap = product.reshape(*w.shape[2:], group.shape[0], -1)
            to_w.append(by_tap.permute(3, 2, 0, 1))
    grad_x = _joined(to_x).transpose(0, 1) if wanted[0] else None
    grad_w = _joined(to_w) if wanted[1] else None
    grad_bias = by_channel.sum(1) if wanted[2] else None
    return grad_x, grad_w, grad_bias


def _flat_backward(grad: Tensor, x: Tensor, w: Tensor, *options: Any) -> tuple[Tensor | None, ...]:
    """Return the gradients of a convolution of one dimension, as of one with a height of 1."""
    bias_shape, *own_options, wanted = options
    wide = _Settings(*own_options).with_height
    to_x, to_w, to_bias = convolution_backward(
        grad.unsqueeze(2),
        x.unsqueeze(2),
        w.unsqueeze(2),
        bias_shape,
        *wide,
        wanted,
    )
    return (
        None if to_x is None else to_x.squeeze(2),
        None if to_w is None else to_w.squeeze(2),
        to_bias,
    )


def _pool_window(options: Sequence[Any]) -> _Window:
    """Return the window of a pooling, of whose options the last may be left out."""
    if len(options) > 4 and options[4]:
        raise ExportError(
            "max pooling with ceil_mode is not lowered to slices; leave ceil_mode out"
        )
    sizes = []
    for size in options[:4]:
        sizes.append([*size] if len(size) > 1 else [*size] * 2)
    kernel, stride, padding, dilation = sizes + [[], [0, 0], [1, 1]][len(sizes) - 1 :]
    return _Window(kernel, stride or kernel, padding, dilation)


def max_pool(x: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Return ``aten.max_pool2d_with_indices`` with the largest values for the indices, too."""
    slices = _pool_window(options).slices(x, _LOWEST)
    largest = functools.reduce(torch.maximum, slices)
    return largest, largest


def max_pool_backward(grad: Tensor, x: Tensor, *options: Any) -> Tensor:
    """Return the gradient of `max_pool`: that of a window goes to the first of its largest."""
    *sizes, largest = options
    window = _pool_window(sizes)
    slopes: list[Tensor] = []
    unclaimed = None  # 1 until a place of the window has the largest
    for candidates in window.slices(x, _LOWEST):
        hit = torch.clamp((candidates - largest) * _STEEP + 1, 0, 1)
        if unclaimed is None:
            unclaimed = 1 - hit
        else:
            hit = hit * unclaimed
            unclaimed = unclaimed - hit
        slopes.append(grad * hit)
    return window.add_slices(slopes, x.shape[-2:])


def _threshold_backward(grad: Tensor, x: Tensor, bound: float) -> Tensor:
    above = x - bound if bound else x
    return grad * torch.clamp(above * _STEEP, 0, 1)


def _unsqueeze(x: Tensor, dim: int) -> Tensor:
    place = dim % (x.dim() + 1)
    return x.reshape([*x.shape[:place], 1, *x.shape[place:]])


def _norm(x: Tensor, order: float = 2, dims: Any = None, keepdim: bool = False, **_: Any) -> Tensor:
    if order != 2:
        raise ExportError(f"norms of order {order} are not lowered; take order 2")
    return (x * x).sum(dims or [*range(x.dim())], keepdim).sqrt()


# The Python functions behind the operators of batch norms, which have no public name.
_STATIC_BATCH_NORM = static_batch_norm._init_fn  # noqa: SLF001
_STATIC_BATCH_NORM_BACKWARD = static_batch_norm_backward._init_fn  # noqa: SLF001


def _point_settings(x: Tensor) -> tuple[Any, ...]:
    """Return the settings of a convolution of single places."""
    rank = x.dim() - 2
    return ([1] * rank, [0] * rank, [1] * rank, False, [0] * rank, 1)


def _pointwise_norm(x: Tensor, w: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    convolved = convolution(x, w, None, *_point_settings(x))
    normed: Tensor = _STATIC_BATCH_NORM(convolved, scale, shift, eps)
    return normed


def _pointwise_norm_backward(
    grad: Tensor, x: Tensor, w: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor | None, ...]:
    settings = _point_settings(x)
    convolved = convolution(x, w, None, *settings)
    slope, *to_norm = _STATIC_BATCH_NORM_BACKWARD(grad, convolved, scale, eps)
    to_x, to_w, _ = convolution_backward(slope, x, w, None, *settings, (True, True, False))
    return (to_x, to_w, *to_norm)


MATRIX_PRODUCTS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        aten.convolution.default: convolution,
        aten.convolution_backward.default: convolution_backward,
        aten.max_pool2d_with_indices.default: max_pool,
        aten.max_pool2d_with_indices_backward.default: max_pool_backward,
        aten.threshold_backward.default: _threshold_backward,
        aten.linalg_vector_norm.default: _norm,
        aten.unsqueeze.default: _unsqueeze,
        aten.mm.default: _mm,
        aten.addmm.default: _addmm,
        torch.ops.shoal.static_batch_norm.default: _STATIC_BATCH_NORM,
        torch.ops.shoal.static_batch_norm_backward.default: _STATIC_BATCH_NORM_BACKWARD,
        torch.ops.shoal.pointwise_norm.default: _pointwise_norm,
        torch.ops.shoal.pointwise_norm_backward.default: _pointwise_norm_backward,
    }
)
"""What stands for operators of a traced program, for `make_fx` with sizes that are numbers."""
