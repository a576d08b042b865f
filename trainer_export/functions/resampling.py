"""Resizing, average pooling and padding, each as one linear map per axis.

The map is a matrix product, or a look-up if it only selects elements. Its matrix is the result of
PyTorch's function on the identity.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from fleet_protocol.errors import ExportError
from trainer_export.operators import take

_FEW = 16  # with at most this many uses of an element, a look-up's gradient is a sum of look-ups


def _matrix(
    size: int,
    axis: int,
    rank: int,
    function: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the matrix of a function of [batch, channels, ...] along an axis of this size.

    Returns:
        Float32 [size, outputs].
    """
    # Outside of the trace, which would otherwise record this computation instead of its result.
    with _disable_current_modes(), torch.no_grad():
        shape = [1] * rank
        shape[axis] = size
        identity = torch.eye(size).reshape(size, 1, *shape)
        matrix: Tensor = function(identity).reshape(size, -1)
    return matrix


def _along(x: Tensor, axis: int, matrix: Tensor) -> Tensor:
    """Multiply one axis with a matrix [size, outputs]."""
    with _disable_current_modes():
        size, outputs = matrix.shape
        # Common for one axis of several, such as padding on one side.
        if size == outputs and torch.equal(matrix, torch.eye(size)):
            return x
        is_binary = bool(((matrix == 0) | (matrix == 1)).all())
        # Then no number is multiplied: a look-up is exact, and cheaper than a product with zeros.
        selects = is_binary and bool((matrix.sum(0) <= 1).all())
        has_few_uses = int(matrix.sum(1).max()) <= _FEW
        # -1 is an output that selects nothing, which is 0.
        index = torch.where(
            matrix.sum(0) > 0,
            matrix.argmax(0),
            -1,
        ).tolist()
    if selects and has_few_uses:
        selected: Tensor = take(x, axis, index)
        return selected
    return torch.matmul(x.movedim(axis, -1), matrix).movedim(-1, axis)


def along_axes(x: Tensor, functions: Sequence[Callable[[Tensor], Tensor] | None]) -> Tensor:
    """Apply a separable linear function to float32 [batch, channels, ...].

    Args:
        x: the tensor.
        functions: for each spatial axis, a function of a tensor whose other spatial axes
            have size 1; None leaves the axis unchanged.
    """
    rank = len(functions)
    for axis, function in enumerate(functions):
        if function is not None:
            x = _along(
                x,
                axis + 2,
                _matrix(int(x.shape[axis + 2]), axis, rank, function),
            )
    return x


def for_each_axis(value: Any, rank: int) -> list[Any]:
    """Return one value per axis, from a single value or one value per axis."""
    return list(value) if isinstance(value, (tuple, list)) else [value] * rank


# Arguments of interpolate after scale_factor, in PyTorch's order.
_INTERPOLATION = ("mode", "align_corners", "recompute_scale_factor", "antialias")


def _interpolate(
    x: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    *args: Any,
    **settings: Any,
) -> Any:
    rank = x.dim() - 2
    settings |= dict(zip(_INTERPOLATION, args, strict=False))
    if settings.get("antialias"):
        raise ExportError(
            "interpolate(antialias=True) cannot be exported; use mode='area', or average pooling"
            " before it"
        )
    keyword = "size" if scale_factor is None else "scale_factor"
    values = for_each_axis(size if scale_factor is None else scale_factor, rank)

    def resize(axis: int) -> Callable[[Tensor], Tensor]:
        sizes: list[Any] = [1] * rank
        sizes[axis] = values[axis]
        keywords: dict[str, Any] = {**settings, keyword: sizes}
        return lambda eye: functional.interpolate(eye, **keywords)

    return along_axes(x, [resize(axis) for axis in range(rank)])


def _adaptive(rank: int) -> Callable[..., Tensor]:
    def pool(x: Tensor, output_size: Any) -> Any:
        if x.dim() != rank + 2:
            return NotImplemented
        counts = for_each_axis(output_size, rank)
        for axis, count in enumerate(counts):
            if count is None:
                # PyTorch's None means that the axis stays.
                counts[axis] = x.shape[axis + 2]
        if all(count == 1 for count in counts):
            # PyTorch's program of a map whose entries do not lie side by side, as channels that a
            # transposition brought to the front, has strides, which graphs do not have.
            is_spread = x.stride(-1) != 1
            if rank != 3 and not is_spread:
                return NotImplemented
            return x.mean(tuple(range(2, x.dim())), keepdim=True)

        def shrink(count: int) -> Callable[[Tensor], Tensor]:
            return lambda eye: functional.adaptive_avg_pool1d(eye.flatten(1).unsqueeze(1), count)

        return along_axes(x, [shrink(int(count)) for count in counts])

    return pool


def _as_it_is(*_: Any, **__: Any) -> Any:
    return NotImplemented


def with_channels(
    function: Any,
    rank: int,
    written: Callable[..., Any] = _as_it_is,
) -> Callable[..., Any]:
    """Let pooling also accept maps [batch, ...] without channels, as PyTorch does.

    Args:
        function: PyTorch's pooling.
        rank: its spatial axes.
        written: the same pooling in other functions, if possible.
    """

    def pool(x: Tensor, *args: Any, **settings: Any) -> Any:
        if x.dim() != rank + 1:
            return written(x, *args, **settings)
        pooled = written(x.unsqueeze(1), *args, **settings)
        if pooled is NotImplemented:
            pooled = function(x.unsqueeze(1), *args, **settings)
        return pooled.squeeze(1)

    return pool


def _average(rank: int) -> Callable[..., Tensor]:
    def pool(
        x: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        kernel = for_each_axis(kernel_size, rank)
        pads = for_each_axis(padding, rank)
        steps = kernel if stride is None or stride == () else for_each_axis(stride, rank)
        # Tiles that touch and leave nothing over.
        is_tiling = steps == kernel and not any(pads) and not ceil_mode
        is_sum = divisor_override is not None
        # Plain tiles have a lowering.
        if x.dim() != rank + 2 or (is_tiling and rank < 3 and not is_sum):
            return NotImplemented

        def shrink(axis: int) -> Callable[[Tensor], Tensor]:
            settings = (
                (kernel[axis], 1),
                (steps[axis], 1),
                (pads[axis], 0),
                ceil_mode,
                count_include_pad,
            )
            return lambda eye: functional.avg_pool2d(
                eye.flatten(1)[:, None, :, None],
                *settings,
                1 if is_sum else None,
            )

        pooled = along_axes(x, [shrink(axis) for axis in range(rank)])
        return pooled if divisor_override is None else pooled / divisor_override

    return pool


def _pad(
    x: Tensor,
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> Any:
    # Only constant padding has a value, and it has a lowering.
    del value
    if mode == "constant":
        return NotImplemented
    count = len(pad) // 2
    if x.dim() == count + 1:  # maps [batch, ...] without channels
        return _pad(x.unsqueeze(1), pad, mode).squeeze(1)

    def widen(around: Sequence[int]) -> Callable[[Tensor], Tensor]:
        return lambda eye: functional.pad(eye.flatten(1).unsqueeze(1), list(around), mode)

    functions: list[Callable[[Tensor], Tensor] | None] = [None] * (x.dim() - 2 - count)
    # PyTorch lists the last axis first.
    for place in reversed(range(count)):
        around = pad[2 * place : 2 * place + 2]
        functions.append(widen(around) if any(around) else None)
    return along_axes(x, functions)


def _response_norm(
    x: Tensor,
    size: int,
    alpha: float = 1e-4,
    beta: float = 0.75,
    k: float = 1.0,
) -> Tensor:
    """Divide by a mean of squares over neighbouring channels, which become a spatial axis."""

    def mean_of_neighbours(eye: Tensor) -> Tensor:
        # PyTorch pads one more below if the size is even.
        channels = functional.pad(eye.flatten(1).unsqueeze(1), (size // 2, (size - 1) // 2))
        return functional.avg_pool1d(channels, size, 1)

    squares = (x * x).flatten(2).transpose(1, 2)
    mean = along_axes(squares.unsqueeze(1), [None, mean_of_neighbours])
    mean = mean.squeeze(1).transpose(1, 2).reshape(x.shape)
    return x / (mean * alpha + k) ** beta


FUNCTIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        functional.interpolate: _interpolate,
        functional.adaptive_avg_pool1d: _adaptive(1),
        functional.adaptive_avg_pool2d: _adaptive(2),
        functional.adaptive_avg_pool3d: _adaptive(3),
        functional.avg_pool1d: with_channels(functional.avg_pool1d, 1, _average(1)),
        functional.avg_pool2d: with_channels(functional.avg_pool2d, 2, _average(2)),
        functional.avg_pool3d: _average(3),
        functional.pad: _pad,
        functional.local_response_norm: _response_norm,
    }
)
