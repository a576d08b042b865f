"""Resizing, average pooling and padding as one map per axis: a matrix product, or a look-up where
it only selects.

What such a function does along an axis is asked of the function itself: it is applied to the
identity.
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

_FEW = 16  # uses of one element up to which a look-up's gradient is a sum of look-ups


def _matrix(size: int, axis: int, rank: int, function: Callable[[Tensor], Tensor]) -> Tensor:
    """What a function of [batch, channels, ...] does along an axis of ``size``: float32 [size,
    outputs].
    """
    with _disable_current_modes(), torch.no_grad():
        shape = [1] * rank
        shape[axis] = size
        made: Tensor = function(torch.eye(size).reshape(size, 1, *shape)).reshape(size, -1)
    return made


def _along(x: Tensor, axis: int, matrix: Tensor) -> Tensor:
    """The product of one axis with a matrix [size, outputs]."""
    with _disable_current_modes():
        size, outputs = matrix.shape
        if size == outputs and torch.equal(matrix, torch.eye(size)):
            return x
        selects = bool(((matrix == 0) | (matrix == 1)).all()) and bool((matrix.sum(0) <= 1).all())
        few = int(matrix.sum(1).max()) <= _FEW
        index = torch.where(matrix.sum(0) > 0, matrix.argmax(0), -1).tolist()
    if selects and few:
        chosen: Tensor = take(x, axis, index)
        return chosen
    return torch.matmul(x.movedim(axis, -1), matrix).movedim(-1, axis)


def along_axes(x: Tensor, functions: Sequence[Callable[[Tensor], Tensor] | None]) -> Tensor:
    """Apply a separable linear function to float32 [batch, channels, ...].

    For each spatial axis it is what is done to a tensor whose other spatial axes have size 1; None
    for nothing.
    """
    rank = len(functions)
    for axis, function in enumerate(functions):
        if function is not None:
            x = _along(x, axis + 2, _matrix(int(x.shape[axis + 2]), axis, rank, function))
    return x


def each(value: Any, rank: int) -> list[Any]:
    """One value for each axis, of a value for all of them or one each."""
    return list(value) if isinstance(value, (tuple, list)) else [value] * rank


def _interpolate(
    x: Tensor, size: Any = None, scale_factor: Any = None, *args: Any, **settings: Any
) -> Any:
    rank = x.dim() - 2
    settings |= dict(
        zip(
            ("mode", "align_corners", "recompute_scale_factor", "antialias"),
            args,
            strict=False,
        )
    )
    if settings.get("antialias"):
        raise ExportError(
            "interpolate(antialias=True) cannot be exported; use mode='area', or average pooling before"
        )
    given = "size" if scale_factor is None else "scale_factor"
    values = each(size if scale_factor is None else scale_factor, rank)

    def resize(axis: int) -> Callable[[Tensor], Tensor]:
        along: dict[str, Any] = {
            **settings,
            given: [values[axis] if other == axis else 1 for other in range(rank)],
        }
        return lambda eye: functional.interpolate(eye, **along)

    return along_axes(x, [resize(axis) for axis in range(rank)])


def _adaptive(rank: int) -> Callable[..., Tensor]:
    def pool(x: Tensor, output_size: Any) -> Any:
        if x.dim() != rank + 2:
            return NotImplemented
        wanted = [x.shape[i + 2] if n is None else n for i, n in enumerate(each(output_size, rank))]
        if all(n == 1 for n in wanted):
            return x.mean(tuple(range(2, x.dim())), keepdim=True) if rank == 3 else NotImplemented

        def shrink(count: int) -> Callable[[Tensor], Tensor]:
            return lambda eye: functional.adaptive_avg_pool1d(eye.flatten(1).unsqueeze(1), count)

        return along_axes(x, [shrink(int(n)) for n in wanted])

    return pool


def lifted(
    function: Any,
    rank: int,
    otherwise: Callable[..., Any] = lambda *_, **__: NotImplemented,
) -> Any:
    """A function of pooling that takes maps [batch, ...] without channels as well, as PyTorch does."""

    def pool(x: Tensor, *args: Any, **settings: Any) -> Any:
        bare = x.dim() == rank + 1
        made = otherwise(x.unsqueeze(1) if bare else x, *args, **settings)
        if bare:
            return (
                function(x.unsqueeze(1), *args, **settings) if made is NotImplemented else made
            ).squeeze(1)
        return made

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
        kernel = each(kernel_size, rank)
        pads = each(padding, rank)
        steps = kernel if stride is None or stride == () else each(stride, rank)
        tiling = steps == kernel and not any(pads) and not ceil_mode
        summed = divisor_override is not None
        if x.dim() != rank + 2 or (tiling and rank < 3 and not summed):
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
                eye.flatten(1)[:, None, :, None], *settings, 1 if summed else None
            )

        means = along_axes(x, [shrink(axis) for axis in range(rank)])
        return means / divisor_override if divisor_override is not None else means

    return pool


def _pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    del value
    if mode == "constant":
        return NotImplemented
    count = len(pad) // 2
    if x.dim() == count + 1:  # maps [batch, ...] without channels
        return _pad(x.unsqueeze(1), pad, mode).squeeze(1)

    def widen(around: Sequence[int]) -> Callable[[Tensor], Tensor]:
        return lambda eye: functional.pad(eye.flatten(1).unsqueeze(1), list(around), mode)

    around = [pad[2 * i : 2 * i + 2] for i in reversed(range(count))]
    functions: list[Callable[[Tensor], Tensor] | None] = [
        widen(item) if any(item) else None for item in around
    ]
    return along_axes(x, [*[None] * (x.dim() - 2 - count), *functions])


def _response_norm(
    x: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Tensor:
    """A mean of squares over neighbouring channels, which are lifted to an axis of their own."""
    squares = (x * x).flatten(2).transpose(1, 2)
    mean = along_axes(
        squares.unsqueeze(1),
        [
            None,
            lambda eye: functional.avg_pool1d(
                functional.pad(eye.flatten(1).unsqueeze(1), (size // 2, (size - 1) // 2)),
                size,
                1,
            ),
        ],
    )
    return x / (mean.squeeze(1).transpose(1, 2).reshape(x.shape) * alpha + k) ** beta


FUNCTIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        functional.interpolate: _interpolate,
        functional.adaptive_avg_pool1d: _adaptive(1),
        functional.adaptive_avg_pool2d: _adaptive(2),
        functional.adaptive_avg_pool3d: _adaptive(3),
        functional.avg_pool1d: lifted(functional.avg_pool1d, 1, _average(1)),
        functional.avg_pool2d: lifted(functional.avg_pool2d, 2, _average(2)),
        functional.avg_pool3d: _average(3),
        functional.pad: _pad,
        functional.local_response_norm: _response_norm,
    }
)
