"""The convolutional network of HeteroFL for MNIST, and its form for sensor windows.

Diao, Ding, Tarokh: "HeteroFL: Computation and communication efficient federated learning for
heterogeneous clients", ICLR 2021. Layer by layer as in the authors' code: 3x3 convolution with
bias, Scaler, norm, ReLU, max-pooling (not in the last layer); then global average pooling and one
linear layer.

The adaptive method of specification 4 (arXiv:2405.00885) trains a CNN on windows of motion sensors
and does not describe it, so here that has the same layers over time instead of images.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from fleet_protocol.errors import ConfigError
from models.architecture import architecture
from models.cut import Cut
from models.zoo.layers import Norm, NormStyle, Scaler, zero_linear_biases

_LAYERS: Mapping[int, Callable[..., nn.Module]] = MappingProxyType({1: nn.Conv1d, 2: nn.Conv2d})
_POOLS: Mapping[int, Callable[..., Tensor]] = MappingProxyType(
    {1: torch.max_pool1d, 2: torch.max_pool2d}
)
"""By the number of spatial dimensions."""


class ConvUnit(nn.Module):
    """Convolution, Scaler, norm, ReLU and, unless it is the last, max-pooling."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: tuple[int, ...],
        norm_style: NormStyle,
        *,
        pool: bool,
    ) -> None:
        """Make the layer for a kernel of odd sides along 1 or 2 spatial dimensions.

        Pooling halves the sides.
        """
        super().__init__()
        # With an odd kernel this keeps the sides.
        padding = tuple(size // 2 for size in kernel)
        self.conv = _LAYERS[len(kernel)](inputs, outputs, kernel, padding=padding)
        self.scaler = Scaler(norm_style.rate)
        self.norm = norm_style.layer(outputs)
        self.pool = _POOLS[len(kernel)] if pool else None

    def forward(self, x: Tensor) -> Tensor:
        """Compute float32 [batch, outputs, *sides] from float32 [batch, inputs, *sides]."""
        out: Tensor = self.norm(self.scaler(self.conv(x))).relu()
        return self.pool(out, 2) if self.pool is not None else out


class Conv(nn.Module):
    """Convolutional units, global average pooling and a linear classifier."""

    def __init__(
        self,
        inputs: int,
        channels: tuple[int, ...],
        classes: int,
        kernel: tuple[int, ...],
        norm_style: NormStyle,
    ) -> None:
        super().__init__()
        self.units = nn.ModuleList()
        for number, outputs in enumerate(channels, 1):
            pool = number < len(channels)  # as released: the last maps are averaged as they are
            self.units.append(ConvUnit(inputs, outputs, kernel, norm_style, pool=pool))
            inputs = outputs
        self.head = nn.Linear(channels[-1], classes)
        self.sides = tuple(range(2, 2 + len(kernel)))
        zero_linear_biases(self)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits, float32 [batch, classes], of x, float32 [batch, channels, *sides]."""
        for unit in self.units:
            x = unit(x)
        logits: Tensor = self.head(x.mean(self.sides))
        return logits


@architecture(paper="ICLR 2021, arXiv:2010.01264")
def conv(
    cut: Cut,
    *,
    input_shape: tuple[int, int, int] = (1, 28, 28),
    classes: int = 10,
    channels: tuple[int, ...] = (64, 128, 256, 512),
    norm: Norm = "sbn",
    scaler: bool = True,
) -> Conv:
    """Build HeteroFL's CNN; the channels of every layer are cut by width."""
    norm_style = NormStyle(norm, cut.rate if scaler else 1.0)
    if not channels:
        raise ConfigError("channels is empty; name the channels of at least one layer")
    if min(input_shape[1:]) >> (len(channels) - 1) < 1:
        raise ConfigError(
            f"input_shape {input_shape} is too small for {len(channels)} layers, each of which but "
            "the last halves the sides; use fewer channels entries"
        )
    return Conv(
        input_shape[0],
        cut.widths("conv", channels, leading=norm_style.is_grouped),
        cut.classes(classes),
        (3, 3),
        norm_style,
    )


@architecture(
    paper="the CNN@HAR task of arXiv:2405.00885; layers of arXiv:2010.01264 in one dimension"
)
def har_cnn(
    cut: Cut,
    *,
    input_shape: tuple[int, int] = (6, 128),
    classes: int = 7,
    channels: tuple[int, ...] = (32, 64, 128),
    kernel: int = 5,
    norm: Norm = "sbn",
    scaler: bool = True,
) -> Conv:
    """Build a CNN for windows of a 6-axis watch; the channels of every layer are cut by width."""
    norm_style = NormStyle(norm, cut.rate if scaler else 1.0)
    if kernel < 1 or kernel % 2 == 0:
        raise ConfigError(f"kernel {kernel} must be odd, so that a convolution keeps the length")
    if not channels or input_shape[1] >> (len(channels) - 1) < 1:
        raise ConfigError(
            f"input_shape {input_shape} does not fit {len(channels)} layers, all but one halve its "
            "length"
        )
    return Conv(
        input_shape[0],
        cut.widths("conv", channels, leading=norm_style.is_grouped),
        cut.classes(classes),
        (kernel,),
        norm_style,
    )
