"""Max pooling over windows of different sizes and over volumes, as max pooling over rectangles."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fleet_protocol.errors import ExportError
from trainer_export.functions.resampling import for_each_axis, with_channels


def _refuse_indices(name: str, *, wanted: bool) -> None:
    if wanted:
        raise ExportError(
            f"{name}(return_indices=True) cannot be exported; use return_indices=False"
        )


def _adaptive_max(x: Tensor, axis: int, count: int) -> Tensor:
    """Return the maxima of windows along axis 2 or 3 of [batch, channels, height, width].

    The windows have PyTorch's bounds; windows of different sizes overlap.
    """
    size = int(x.shape[axis])
    if size == count:
        return x
    if size % count == 0:
        return _max_along(x, axis, size // count)
    maxima: list[Tensor] = []
    for number in range(count):
        start = number * size // count
        # Rounded up, as in PyTorch: neighbouring windows may share a place.
        end = -(-(number + 1) * size // count)
        maxima.append(
            _max_along(
                x.narrow(axis, start, end - start),
                axis,
                end - start,
            )
        )
    return torch.cat(maxima, axis)


def _max_along(x: Tensor, axis: int, length: int) -> Tensor:
    """Return the maxima of consecutive windows of a length along axis 2 or 3."""
    return functional.max_pool2d(x, (length, 1) if axis == 2 else (1, length))


def _adaptive_pool(rank: int) -> Callable[..., Any]:
    """Return adaptive max pooling of one or two spatial axes."""

    def pool(
        x: Tensor,
        output_size: Any,
        return_indices: bool = False,
    ) -> Any:
        _refuse_indices(f"adaptive_max_pool{rank}d", wanted=return_indices)
        if x.dim() != rank + 2:
            return NotImplemented
        counts = for_each_axis(output_size, rank)
        # One axis becomes the width of a map of height 1.
        plane = x if rank == 2 else x.unsqueeze(2)
        # The last axis first, because PyTorch takes the first of equal maxima in reading order.
        for axis, count in zip((3, 2), reversed(counts), strict=False):
            # None leaves the axis as it is.
            if count is not None:
                plane = _adaptive_max(plane, axis, int(count))
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
    """Pool over height and width first, then over depth: the maximum of maxima."""
    _refuse_indices("max_pool3d", wanted=return_indices)
    if x.dim() != 5:
        return NotImplemented
    kernel = for_each_axis(kernel_size, 3)
    # Without a stride, windows do not overlap.
    steps = kernel if stride is None or stride == () else for_each_axis(stride, 3)
    pads = for_each_axis(padding, 3)
    gaps = for_each_axis(dilation, 3)
    channels = int(x.shape[1])
    depth = int(x.shape[2])
    # Every plane counts as a separate channel.
    plane = functional.max_pool2d(
        x.flatten(1, 2),
        kernel[1:],
        steps[1:],
        pads[1:],
        gaps[1:],
        ceil_mode,
    )
    sides = plane.shape[2:]
    # Depth becomes the height of a map, with the pooled places as its width.
    lines = torch.unflatten(plane, 1, (channels, depth)).flatten(3)
    lines = functional.max_pool2d(
        lines,
        (kernel[0], 1),
        (steps[0], 1),
        (pads[0], 0),
        (gaps[0], 1),
        ceil_mode,
    )
    return torch.unflatten(lines, 3, [int(side) for side in sides])


def _unpool(*_: Any, **__: Any) -> Any:
    raise ExportError("max_unpool cannot be exported; use Upsample or a transposed convolution")


FUNCTIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        functional.adaptive_max_pool1d: _adaptive_pool(1),
        functional.adaptive_max_pool2d: _adaptive_pool(2),
        functional.max_pool3d: _volume,
        functional.max_pool1d: with_channels(functional.max_pool1d, 1),
        functional.max_pool2d: with_channels(functional.max_pool2d, 2),
        **dict.fromkeys(
            (functional.max_unpool1d, functional.max_unpool2d, functional.max_unpool3d),
            _unpool,
        ),
    }
)
