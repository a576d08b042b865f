"""Convolution, pooling and their gradients as slices, paddings and matrix products.

They serve runtimes whose own operators are slow or wrong. A convolution stacks the inputs of its
kernel (im2col) and is one matrix product; its gradient reads the same slices and adds the values of
each place. Batch and channels are exchanged, so that one product covers all samples. All sizes are
numbers. The portable graphs use `rules.conv` and `groups` instead, which write ONNX operators and
choose the fastest way.
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

_LOWEST = -3e38  # padding value that never wins a maximum
_STEEP = 1e38  # a slope that brings the least normal number to 1


@dataclass(frozen=True)
class _Window:
    """The geometry of a kernel: height and width of each value."""

    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    def slices(self, x: Tensor, fill: float = 0.0) -> list[Tensor]:
        """Return the inputs that each place of the kernel meets, [..., output height, width]."""
        top, left = self.padding
        # A maximum is padded with `_LOWEST`, everything else with 0.
        if top or left:
            x = aten.constant_pad_nd(x, [left, left, top, top], fill)
        # Columns first, because they are cut once for all rows of the kernel.
        by_column = []
        for place in range(self.kernel[1]):
            by_column.append(self._run(x, 1, place))
        slices = []
        for row in range(self.kernel[0]):
            for column in by_column:
                slices.append(self._run(column, 0, row))
        return slices

    def add_slices(self, slices: Sequence[Tensor], size: Sequence[int]) -> Tensor:
        """Return the gradient of `slices`: values of the same place are added.

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
        """Return the inputs that one place of the kernel meets along an axis."""
        step = self.stride[axis]
        size = x.shape[axis - 2]
        start = place * self.dilation[axis]
        count = (size - self.dilation[axis] * (self.kernel[axis] - 1) - 1) // step + 1
        end = start + (count - 1) * step + 1
        # A slice of everything would still be an operator of the graph, which copies.
        if end - start == size and step == 1:
            return x
        run: Tensor = aten.slice.Tensor(x, x.dim() + axis - 2, start, end, step)
        return run

    def _added(self, runs: Sequence[Tensor], axis: int, size: int) -> Tensor:
        """Return the sum of the gradients of `_run` for all places along an axis.

        They are added in order, because the order affects the result.
        """
        placed = []
        for place, run in enumerate(runs):
            placed.append(self._placed(run, axis, place, size))
        return functools.reduce(torch.add, placed)

    def _placed(self, x: Tensor, axis: int, place: int, size: int) -> Tensor:
        """Return the gradient of `_run`, with zeros for places that it did not read."""
        step = self.stride[axis]
        count = x.shape[axis - 2]
        behind = [0, 0] * (1 - axis)
        if step > 1 and count > 1:  # zeros between the rows or columns
            apart = aten.constant_pad_nd(x.unsqueeze(axis - 2), [*behind, 0, step - 1], 0.0)
            x = apart.flatten(axis - 3, axis - 2).narrow(axis - 2, 0, (count - 1) * step + 1)
        start = place * self.dilation[axis]
        after = size - start - x.shape[axis - 2]
        # As above: a padding by nothing would copy.
        if not start and not after:
            return x
        placed: Tensor = aten.constant_pad_nd(x, [*behind, start, after], 0.0)
        return placed


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """Return a product of two variable matrices, as a batch of one."""
    product: Tensor = aten.bmm(a.reshape(1, *a.shape), b.reshape(1, *b.shape))
    return product.reshape(a.shape[0], b.shape[1])


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    # Factors of 1 are the usual ones, and each product with one would be a node of the graph.
    product = _mm(a, b) if alpha == 1 else _mm(a, b) * alpha
    return product + (bias if beta == 1 else bias * beta)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _columns(slices: Sequence[Tensor]) -> Tensor:
    """Return the inputs of all outputs, [taps * channels, batch * positions]."""
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
        """The settings of a one-dimensional convolution as two-dimensional ones with height 1."""
        return (
            [1, *self.stride],
            [0, *self.padding],
            [1, *self.dilation],
            self.transposed,
            self.output_padding,
            self.groups,
        )

    def window(self, kernel: Sequence[int]) -> _Window:
        """Return the geometry of a kernel of these sizes."""
        return _Window(kernel, self.stride, self.padding, self.dilation)


def convolution(x: Tensor, w: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """Return ``aten.convolution``, of samples first: ``Y = W columns(X) + b`` for each group."""
    settings = _Settings(*options)
    if _is_flat(x, transposed=settings.transposed):
        # Both take the same path, so that one-dimensional convolutions need no separate slices.
        wide = convolution(x.unsqueeze(2), w.unsqueeze(2), bias, *settings.with_height)
        return wide.squeeze(2)
    window = settings.window(w.shape[2:])
    products: list[Tensor] = []
    shape = torch.Size()
    inputs = x.transpose(0, 1).chunk(settings.groups)
    for group, kernel in zip(inputs, w.chunk(settings.groups), strict=True):
        slices = window.slices(group)
        columns = _columns(slices)
        # In the order of the columns: all channels of one tap, then those of the next.
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
    of ``dY``. A gradient that is not requested is None.
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
    # Once for all groups, because the gradient of the bias does not depend on them.
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
    """Return the gradients of a one-dimensional convolution, computed with height 1."""
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
    """Return the window of a pooling; trailing options may be omitted."""
    if len(options) > 4 and options[4]:
        raise ExportError(
            "max pooling with ceil_mode cannot be lowered to slices; use ceil_mode=False"
        )
    sizes = []
    for size in options[:4]:
        sizes.append([*size] if len(size) > 1 else [*size] * 2)
    kernel, stride, padding, dilation = sizes + [[], [0, 0], [1, 1]][len(sizes) - 1 :]
    return _Window(kernel, stride or kernel, padding, dilation)


def max_pool(x: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Return ``aten.max_pool2d_with_indices``, with the maxima in place of the indices."""
    slices = _pool_window(options).slices(x, _LOWEST)
    largest = functools.reduce(torch.maximum, slices)
    return largest, largest


def max_pool_backward(grad: Tensor, x: Tensor, *options: Any) -> Tensor:
    """Return the gradient of `max_pool`: a window's gradient goes to its first maximum."""
    *sizes, largest = options
    window = _pool_window(sizes)
    slopes: list[Tensor] = []
    unclaimed = None  # 1 until a place of the window has the maximum
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
        raise ExportError(f"norms of order {order} cannot be lowered; use order 2")
    return (x * x).sum(dims or [*range(x.dim())], keepdim).sqrt()


# The Python functions of the batch norm operators, which have no public name.
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
"""Decompositions for `make_fx` with fixed sizes."""
