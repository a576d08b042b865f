"""The settings of convolutions and poolings as torch's operators have them, in their order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fleet_protocol.errors import ExportError
from trainer_export.lowering.columns import Geometry
from trainer_export.lowering.values import Value

Sizes = Sequence[int]


def spread(values: Sizes, rank: int) -> list[int]:
    """One number per spatial dimension; a single one stands for all."""
    return list(values) * rank if len(values) == 1 else list(values)


@dataclass(frozen=True)
class Convolution:
    """The settings of ``aten.convolution``, or of one the other way, whose output may be padded."""

    stride: Sizes
    padding: Sizes
    dilation: Sizes
    transposed: bool
    output_padding: Sizes
    groups: int

    @property
    def settings(self) -> tuple[Any, ...]:
        """As torch's operator takes them."""
        return (
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            self.groups,
        )

    def geometry(self, wide: Sequence[Any], weight: Value, narrow: Sequence[Any]) -> Geometry:
        """Its static shape.

        A transposed one has that of the convolution whose input it makes, which is the wide side.

        Raises:
            ExportError: it goes over a dimension of unknown size.
        """
        if not all(isinstance(size, int) for size in (*wide, *narrow)):
            raise ExportError(
                "a convolution over a dimension that depends on the batch cannot be exported"
            )
        rank = len(wide)
        settings = (
            tuple(spread(sizes, rank)) for sizes in (self.stride, self.padding, self.dilation)
        )
        return Geometry(tuple(wide), tuple(narrow), weight.shape[2:], *settings)


@dataclass(frozen=True)
class Window:
    """The settings of ``aten.max_pool2d_with_indices``.

    An empty stride is that of the kernel's sizes.
    """

    kernel: Sizes
    stride: Sizes = ()
    padding: Sizes = (0, 0)
    dilation: Sizes = (1, 1)
    ceil_mode: bool = False

    @property
    def size(self) -> tuple[int, ...]:
        """Of the window in both dimensions."""
        return tuple(spread(self.kernel, 2))

    @property
    def steps(self) -> tuple[int, ...]:
        """In both dimensions."""
        return tuple(spread(self.stride, 2)) or self.size

    @property
    def is_tiling(self) -> bool:
        """Whether windows touch and do not overlap."""
        plain = not self.ceil_mode and not any(self.padding) and all(d == 1 for d in self.dilation)
        return plain and self.size == self.steps

    @property
    def attributes(self) -> dict[str, Any]:
        """Those of ONNX's pooling operators."""
        return {
            "kernel_shape": list(self.size),
            "strides": list(self.steps),
            "pads": spread(self.padding, 2) * 2,
            "ceil_mode": int(self.ceil_mode),
        }


def mean_window(kernel: Sizes, *rest: Any) -> tuple[Window, bool]:
    """The window of ``aten.avg_pool2d``, and whether padding counts in the mean.

    Divisors are rewritten before.
    """
    stride, padding, ceil_mode, count_include_pad = (
        *rest,
        *((), (0, 0), False, True)[len(rest) :],
    )[:4]
    return Window(kernel, stride, padding, ceil_mode=ceil_mode), count_include_pad
