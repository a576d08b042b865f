"""Maxima over windows of unequal sizes and over volumes, as maxima over rectangles."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fleet_protocol.errors import ExportError
from trainer_export.functions.resampling import each, lifted


def _refuse_indices(name: str, *, wanted: bool) -> None:
    if wanted:
        raise ExportError(f"{name}(return_indices=True) cannot be exported; leave the indices out")


def _shrunk(x: Tensor, axis: int, count: int) -> Tensor:
    """The maxima of ``count`` windows along axis 2 or 3 of [batch, channels, height, width]."""
    size = int(x.shape[axis])
    if size == count:
        return x

    def pooled(part: Tensor, length: int) -> Tensor:
        return functional.max_pool2d(part, (length, 1) if axis == 2 else (1, length))

    if size % count == 0:
        return pooled(x, size // count)
    bounds = [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
    return torch.cat(
        [pooled(x.narrow(axis, start, end - start), end - start) for start, end in bounds],
        axis,
    )


def _adaptive(rank: int) -> Callable[..., Any]:
    def pool(x: Tensor, output_size: Any, return_indices: bool = False) -> Any:
        _refuse_indices(f"adaptive_max_pool{rank}d", wanted=return_indices)
        if x.dim() != rank + 2:
            return NotImplemented
        counts = each(output_size, rank)
        plane = x if rank == 2 else x.unsqueeze(2)
        # The last axis first: of equal maxima PyTorch takes the first in reading order.
        for axis, count in zip((3, 2), reversed(counts), strict=False):
            plane = _shrunk(plane, axis, int(plane.shape[axis]) if count is None else int(count))
        return plane if rank == 2 else plane.squeeze(2)

    return pool


def _volume(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Over height and width first, then over depth: the maximum of maxima."""
    _refuse_indices("max_pool3d", wanted=return_indices)
    if x.dim() != 5:
        return NotImplemented
    kernel = each(kernel_size, 3)
    steps = kernel if stride is None or stride == () else each(stride, 3)
    pads = each(padding, 3)
    gaps = each(dilation, 3)
    channels = int(x.shape[1])
    depth = int(x.shape[2])
    plane = functional.max_pool2d(
        x.flatten(1, 2), kernel[1:], steps[1:], pads[1:], gaps[1:], ceil_mode
    )
    sides = plane.shape[2:]
    lines = torch.unflatten(plane, 1, (channels, depth)).flatten(3)
    lines = functional.max_pool2d(
        lines, (kernel[0], 1), (steps[0], 1), (pads[0], 0), (gaps[0], 1), ceil_mode
    )
    return torch.unflatten(lines, 3, [int(side) for side in sides])


def _unpool(*_: Any, **__: Any) -> Any:
    raise ExportError("max_unpool cannot be exported; use Upsample or a transposed convolution")


FUNCTIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        functional.adaptive_max_pool1d: _adaptive(1),
        functional.adaptive_max_pool2d: _adaptive(2),
        functional.max_pool3d: _volume,
        functional.max_pool1d: lifted(functional.max_pool1d, 1),
        functional.max_pool2d: lifted(functional.max_pool2d, 2),
        **dict.fromkeys(
            (functional.max_unpool1d, functional.max_unpool2d, functional.max_unpool3d),
            _unpool,
        ),
    }
)
