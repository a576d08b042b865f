"""Convolution, pooling and their gradients as slices, paddings and matrix products, for runtimes
slow or wrong at them.

A convolution lays the places that its kernel looks at under one another (im2col) and is one matrix
product; its gradient takes the same slices, and adds what belongs to one place. Batch and channels
change places meanwhile, so that one product is over all samples. All sizes are numbers.
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
from trainer_export.operators import static_batch_norm, static_batch_norm_backward

aten = torch.ops.aten
_LOWEST, _STEEP = (
    -3e38,
    1e38,
)  # what padding never wins with; a slope that takes the least normal number to 1


@dataclass(frozen=True)
class _Window:
    """What a kernel looks at: height and width of each."""

    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    def taken(self, x: Tensor, fill: float = 0.0) -> list[Tensor]:
        """For each place of the kernel what it meets, [..., height, width] of the output."""
        (top, left), (rows, columns) = self.padding, self.kernel
        if top or left:
            x = aten.constant_pad_nd(x, [left, left, top, top], fill)
        parts = [self._run(x, 1, column) for column in range(columns)]
        return [self._run(part, 0, row) for row in range(rows) for part in parts]

    def put_back(self, parts: Sequence[Tensor], size: Sequence[int]) -> Tensor:
        """The gradient of `taken`: parts that met the same place are added."""
        full = [n + 2 * p for n, p in zip(size, self.padding, strict=True)]
        columns = [
            functools.reduce(
                torch.add,
                [
                    self._placed(part, 0, row, full[0])
                    for row, part in enumerate(parts[j :: self.kernel[1]])
                ],
            )
            for j in range(self.kernel[1])
        ]
        whole = functools.reduce(
            torch.add,
            [self._placed(part, 1, j, full[1]) for j, part in enumerate(columns)],
        )
        for axis in (0, 1):
            whole = (
                whole.narrow(axis - 2, self.padding[axis], size[axis])
                if self.padding[axis]
                else whole
            )
        return whole

    def _run(self, x: Tensor, axis: int, place: int) -> Tensor:
        step = self.stride[axis]
        start = place * self.dilation[axis]
        count = (x.shape[axis - 2] - self.dilation[axis] * (self.kernel[axis] - 1) - 1) // step + 1
        end = start + (count - 1) * step + 1
        whole = end - start == x.shape[axis - 2] and step == 1
        return x if whole else aten.slice.Tensor(x, x.dim() + axis - 2, start, end, step)

    def _placed(self, x: Tensor, axis: int, place: int, size: int) -> Tensor:
        step = self.stride[axis]
        count = x.shape[axis - 2]
        behind = [0, 0] * (1 - axis)
        if step > 1 and count > 1:  # zeros between the rows or columns
            apart = aten.constant_pad_nd(x.unsqueeze(axis - 2), [*behind, 0, step - 1], 0.0)
            x = apart.flatten(axis - 3, axis - 2).narrow(axis - 2, 0, (count - 1) * step + 1)
        start = place * self.dilation[axis]
        after = size - start - x.shape[axis - 2]
        return aten.constant_pad_nd(x, [*behind, start, after], 0.0) if start or after else x


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """A product of two matrices that change, as a batch of one."""
    product: Tensor = aten.bmm(a.reshape(1, *a.shape), b.reshape(1, *b.shape))
    return product.reshape(a.shape[0], b.shape[1])


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = _mm(a, b) if alpha == 1 else _mm(a, b) * alpha
    return product + (bias if beta == 1 else bias * beta)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _columns(x: Tensor, window: _Window) -> tuple[Tensor, list[Tensor]]:
    parts = window.taken(x)
    return _joined(parts).reshape(len(parts) * x.shape[0], -1), parts


def _flat(x: Tensor, *sizes: Sequence[int]) -> bool:
    """Whether a convolution has one dimension; others than one and two are refused."""
    if x.dim() > 4 or any(sizes):
        raise ExportError(
            "convolutions in three dimensions and transposed ones are not lowered to matrix products"
        )
    return x.dim() == 3


def convolution(x: Tensor, w: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """``aten.convolution``, of samples first."""
    stride, padding, dilation, transposed, output_padding, groups = options
    if _flat(x, [1] * transposed):
        wider = (
            [1, *stride],
            [0, *padding],
            [1, *dilation],
            transposed,
            output_padding,
            groups,
        )
        return convolution(x.unsqueeze(2), w.unsqueeze(2), bias, *wider).squeeze(2)
    window = _Window(w.shape[2:], stride, padding, dilation)
    y = list[Tensor]()
    shape = torch.Size()
    for part, kernel in zip(x.transpose(0, 1).chunk(groups), w.chunk(groups), strict=True):
        columns, parts = _columns(part, window)
        y.append(_mm(kernel.permute(0, 2, 3, 1).reshape(kernel.shape[0], -1), columns))
        shape = parts[0].shape[1:]
    found = _joined(y) if bias is None else _joined(y) + bias.unsqueeze(1)
    return found.reshape(w.shape[0], *shape).transpose(0, 1)


def convolution_backward(
    grad: Tensor, x: Tensor, w: Tensor, *options: Any
) -> tuple[Tensor | None, ...]:
    """``aten.convolution_backward``: the gradients of what goes in, of the weights and of the bias,
    if wanted.
    """
    sizes, stride, padding, dilation, transposed, output_padding, groups, wanted = options
    if _flat(x, [1] * transposed):
        wider = (
            sizes,
            [1, *stride],
            [0, *padding],
            [1, *dilation],
            transposed,
            output_padding,
            groups,
            wanted,
        )
        to_x, to_w, to_bias = convolution_backward(
            grad.unsqueeze(2), x.unsqueeze(2), w.unsqueeze(2), *wider
        )
        return (
            None if to_x is None else to_x.squeeze(2),
            None if to_w is None else to_w.squeeze(2),
            to_bias,
        )
    window = _Window(w.shape[2:], stride, padding, dilation)
    count = math.prod(w.shape[2:])
    slopes: list[list[Tensor]] = [[], []]
    chunks = (
        x.transpose(0, 1).chunk(groups),
        w.chunk(groups),
        grad.transpose(0, 1).chunk(groups),
    )
    flat = grad.transpose(0, 1).reshape(grad.shape[1], -1)
    for part, kernel, slope in zip(*chunks, strict=True):
        rows = slope.reshape(slope.shape[0], -1)
        channels = part.shape[0]
        if wanted[0]:
            columns = _mm(kernel.permute(2, 3, 1, 0).reshape(-1, kernel.shape[0]), rows)
            parts = columns.reshape(count, channels, *slope.shape[1:]).unbind()
            slopes[0].append(window.put_back(parts, x.shape[2:]))
        if wanted[1]:
            product = _mm(_columns(part, window)[0], rows.t())
            slopes[1].append(product.reshape(*w.shape[2:], channels, -1).permute(3, 2, 0, 1))
    return (
        _joined(slopes[0]).transpose(0, 1) if wanted[0] else None,
        _joined(slopes[1]) if wanted[1] else None,
        flat.sum(1) if wanted[2] else None,
    )


def _pool_window(options: Sequence[Any]) -> _Window:
    """Of the options of a pooling, of which the last may be left out."""
    if len(options) > 4 and options[4]:
        raise ExportError(
            "max pooling with ceil_mode is not lowered to slices; leave ceil_mode out"
        )
    given = [[*size] if len(size) > 1 else [*size] * 2 for size in options[:4]]
    kernel, *rest = given + [[], [0, 0], [1, 1]][len(given) - 1 :]
    return _Window(kernel, rest[0] or kernel, *rest[1:])


def max_pool(x: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """``aten.max_pool2d_with_indices``, with the largest values once more in the place of their
    indices.
    """
    largest = functools.reduce(torch.maximum, _pool_window(options).taken(x, _LOWEST))
    return largest, largest


def max_pool_backward(grad: Tensor, x: Tensor, *options: Any) -> Tensor:
    """The gradient of `max_pool`: that of a window goes to the first of its largest."""
    *sizes, largest = options
    window = _pool_window(sizes)
    slopes = list[Tensor]()
    left = None
    for part in window.taken(x, _LOWEST):
        hit = torch.clamp((part - largest) * _STEEP + 1, 0, 1)
        hit = hit if left is None else hit * left
        left = (1 if left is None else left) - hit
        slopes.append(grad * hit)
    return window.put_back(slopes, x.shape[-2:])


def _threshold_backward(grad: Tensor, x: Tensor, bound: float) -> Tensor:
    return grad * torch.clamp((x - bound if bound else x) * _STEEP, 0, 1)


def _unsqueeze(x: Tensor, dim: int) -> Tensor:
    place = dim % (x.dim() + 1)
    return x.reshape([*x.shape[:place], 1, *x.shape[place:]])


def _norm(x: Tensor, order: float = 2, dims: Any = None, keepdim: bool = False, **_: Any) -> Tensor:
    if order != 2:
        raise ExportError(f"norms of order {order} are not lowered; take order 2")
    return (x * x).sum(dims or [*range(x.dim())], keepdim).sqrt()


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
        torch.ops.shoal.static_batch_norm.default: static_batch_norm._init_fn,  # noqa: SLF001 - no public name
        torch.ops.shoal.static_batch_norm_backward.default: static_batch_norm_backward._init_fn,  # noqa: SLF001
    }
)
"""What stands for operators of a traced program, for `make_fx` with sizes that are numbers."""
