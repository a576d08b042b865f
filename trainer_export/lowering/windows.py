"""The settings of convolutions and poolings, in the argument order of torch's operators."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fleet_protocol.errors import ExportError
from trainer_export.lowering.geometry import Geometry
from trainer_export.lowering.values import Value, is_fixed, is_single

Sizes = Sequence[int]


def spread(values: Sizes, rank: int) -> list[int]:
    """Return one number per spatial dimension; a single number applies to all."""
    return list(values) * rank if len(values) == 1 else list(values)


@dataclass(frozen=True)
class Convolution:
    """The settings of ``aten.convolution``; a transposed one may pad its output."""

    stride: Sizes
    padding: Sizes
    dilation: Sizes
    transposed: bool
    output_padding: Sizes
    groups: int

    @property
    def settings(self) -> tuple[Any, ...]:
        """Arguments of torch's operator."""
        return (
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            self.groups,
        )

    def geometry(self, wide: Sequence[Any], weight: Value, narrow: Sequence[Any]) -> Geometry:
        """Return its static shape.

        A transposed convolution has the shape of the convolution whose gradient it is.

        Args:
            wide: spatial sizes of that convolution's input.
            weight: its kernel.
            narrow: spatial sizes of its output.

        Raises:
            ExportError: the convolution runs over a dimension of unknown size.
        """
        if not is_fixed((*wide, *narrow)):
            raise ExportError(
                "a convolution over a dimension that depends on the batch size cannot be"
                " exported; use fixed spatial sizes"
            )
        rank = len(wide)
        return Geometry(
            tuple(wide),
            tuple(narrow),
            weight.shape[2:],
            tuple(spread(self.stride, rank)),
            tuple(spread(self.padding, rank)),
            tuple(spread(self.dilation, rank)),
        )


@dataclass(frozen=True)
class Window:
    """The settings of ``aten.max_pool2d_with_indices``.

    An empty stride equals the kernel's sizes.
    """

    kernel: Sizes
    stride: Sizes = ()
    padding: Sizes = (0, 0)
    dilation: Sizes = (1, 1)
    ceil_mode: bool = False

    @property
    def size(self) -> tuple[int, ...]:
        """Height and width of the window."""
        return tuple(spread(self.kernel, 2))

    @property
    def steps(self) -> tuple[int, ...]:
        """Stride in height and width."""
        return tuple(spread(self.stride, 2)) or self.size

    @property
    def is_tiling(self) -> bool:
        """Return whether windows are adjacent without overlap."""
        if self.ceil_mode or any(self.padding) or not is_single(self.dilation):
            return False
        return self.size == self.steps

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of ONNX's pooling operators."""
        return {
            "kernel_shape": list(self.size),
            "strides": list(self.steps),
            # ONNX lists the beginnings of all dimensions, then the ends.
            "pads": spread(self.padding, 2) * 2,
            "ceil_mode": int(self.ceil_mode),
        }


def mean_window(
    kernel: Sizes,
    stride: Sizes = (),
    padding: Sizes = (0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    *_divisor: Any,
) -> tuple[Window, bool]:
    """Return the window of ``aten.avg_pool2d``, and whether padding counts in the mean.

    Divisors have been rewritten before.
    """
    return Window(kernel, stride, padding, ceil_mode=ceil_mode), count_include_pad
