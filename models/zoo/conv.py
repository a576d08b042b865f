"""The convolutional network of HeteroFL for MNIST, with static batch norm and Scaler.

Diao, Ding, Tarokh: "HeteroFL: Computation and communication efficient federated learning for heterogeneous
clients", ICLR 2021. Layer by layer as in the authors' code: 3x3 convolution with bias, Scaler, norm, ReLU,
max-pooling (not in the last layer); then global average pooling and one linear layer.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from fleet_protocol.errors import ConfigError
from models.cut import Cut
from models.registry import architecture
from models.zoo.layers import Scaler, StaticBatchNorm, zero_linear_biases

__all__ = ["Conv", "ConvUnit", "conv"]

Norm = Literal["sbn", "none"]


class ConvUnit(nn.Module):
    """Convolution, Scaler, norm, ReLU and, unless it is the last, max-pooling."""

    def __init__(self, inputs: int, outputs: int, *, norm: Norm, rate: float, pool: bool) -> None:
        """Make the layer.

        Args:
            inputs: input channels.
            outputs: output channels.
            norm: ``sbn`` for static batch norm, ``none`` for none.
            rate: width share for the Scaler; 1 for none.
            pool: whether to halve the sides.
        """
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.scaler = Scaler(rate)
        self.norm = StaticBatchNorm(outputs) if norm == "sbn" else nn.Identity()
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        """Compute float32 [batch, outputs, height, width] from float32 [batch, inputs, height, width]."""
        x = self.norm(self.scaler(self.conv(x))).relu()
        return torch.max_pool2d(x, 2) if self.pool else x


class Conv(nn.Module):
    """Convolutional units, global average pooling and a linear classifier."""

    def __init__(
        self, input_channels: int, channels: tuple[int, ...], classes: int, *, norm: Norm, rate: float
    ) -> None:
        """Make the network.

        Args:
            input_channels: channels of one sample.
            channels: output channels of each unit.
            classes: logits.
            norm: as in `ConvUnit`.
            rate: as in `ConvUnit`.
        """
        super().__init__()
        last = len(channels) - 1
        self.units = nn.ModuleList(
            ConvUnit(inputs, outputs, norm=norm, rate=rate, pool=position != last)
            for position, (inputs, outputs) in enumerate(zip((input_channels, *channels), channels, strict=False))
        )
        self.head = nn.Linear(channels[-1], classes)
        zero_linear_biases(self)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits, float32 [batch, classes], of x, float32 [batch, channels, height, width]."""
        for unit in self.units:
            x = unit(x)
        logits: Tensor = self.head(x.mean((2, 3)))
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
    if norm not in ("sbn", "none"):
        raise ConfigError(f"norm {norm!r} is unknown; choose 'sbn' or 'none'")
    if not channels:
        raise ConfigError("channels is empty; name the channels of at least one layer")
    if min(input_shape[1:]) >> (len(channels) - 1) < 1:
        raise ConfigError(
            f"input_shape {input_shape} is too small for {len(channels)} layers, each of which but the last"
            " halves the sides; use fewer channels entries"
        )
    kept = tuple(cut.width(f"conv{number}", size) for number, size in enumerate(channels, 1))
    return Conv(input_shape[0], kept, cut.classes(classes), norm=norm, rate=cut.rate if scaler else 1.0)
