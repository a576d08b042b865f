"""A convolutional network for windows of motion sensors, the 1-D sibling of HeteroFL's CNN.

WHALE-FL (Su, Liu, Li, Wang, Chen: "WHALE-FL: Wireless and heterogeneity aware latency efficient federated learning
over mobile devices via adaptive subnetwork scheduling") trains a CNN on human activity data and does not describe it.
So this one copies the layer of HeteroFL's CNN (Diao, Ding, Tarokh, ICLR 2021): convolution with bias, Scaler, norm,
ReLU, max-pooling in all layers but the last; then the average over time and one linear layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fleet_protocol.errors import ConfigError
from models.cut import Cut
from models.registry import architecture
from models.zoo.conv import Norm
from models.zoo.layers import Scaler, StaticBatchNorm, zero_linear_biases

__all__ = ["HarCnn", "SensorUnit", "har_cnn"]


class SensorUnit(nn.Module):
    """Convolution over time, Scaler, norm, ReLU and, unless it is the last, max-pooling."""

    def __init__(self, inputs: int, outputs: int, kernel: int, *, norm: Norm, rate: float, pool: bool) -> None:
        """Make the layer.

        Args:
            inputs: input channels.
            outputs: output channels.
            kernel: time steps that the convolution sees, odd.
            norm: ``sbn`` for static batch norm, ``none`` for none.
            rate: width share for the Scaler; 1 for none.
            pool: whether to halve the length.
        """
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, padding=kernel // 2)
        self.scaler = Scaler(rate)
        self.norm = StaticBatchNorm(outputs) if norm == "sbn" else nn.Identity()
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        """Compute float32 [batch, outputs, length] from float32 [batch, inputs, length]."""
        x = self.norm(self.scaler(self.conv(x))).relu()
        return torch.max_pool1d(x, 2) if self.pool else x


class HarCnn(nn.Module):
    """Convolutional units, the average over time and a linear classifier."""

    def __init__(
        self, input_channels: int, channels: tuple[int, ...], classes: int, *, kernel: int, norm: Norm, rate: float
    ) -> None:
        """Make the network.

        Args:
            input_channels: sensor axes of one sample.
            channels: output channels of each unit.
            classes: logits.
            kernel: as in `SensorUnit`.
            norm: as in `SensorUnit`.
            rate: as in `SensorUnit`.
        """
        super().__init__()
        last = len(channels) - 1
        self.units = nn.ModuleList(
            SensorUnit(inputs, outputs, kernel, norm=norm, rate=rate, pool=position != last)
            for position, (inputs, outputs) in enumerate(zip((input_channels, *channels), channels, strict=False))
        )
        self.head = nn.Linear(channels[-1], classes)
        zero_linear_biases(self)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits, float32 [batch, classes], of x, float32 [batch, sensor axes, length]."""
        for unit in self.units:
            x = unit(x)
        logits: Tensor = self.head(x.mean(2))
        return logits


@architecture(paper="the CNN@HAR task of WHALE-FL; layers of arXiv:2010.01264 in one dimension")
def har_cnn(
    cut: Cut,
    *,
    input_shape: tuple[int, int] = (6, 128),
    classes: int = 7,
    channels: tuple[int, ...] = (32, 64, 128),
    kernel: int = 5,
    norm: Norm = "sbn",
    scaler: bool = True,
) -> HarCnn:
    """Build a CNN for windows of a 6-axis watch; the channels of every layer are cut by width."""
    if norm not in ("sbn", "none"):
        raise ConfigError(f"norm {norm!r} is unknown; choose 'sbn' or 'none'")
    if kernel < 1 or kernel % 2 == 0:
        raise ConfigError(f"kernel {kernel} must be odd, so that a convolution keeps the length")
    if not channels or input_shape[1] >> (len(channels) - 1) < 1:
        raise ConfigError(
            f"input_shape {input_shape} does not fit {len(channels)} layers, all but one halve its length"
        )
    kept = tuple(cut.width(f"conv{number}", size) for number, size in enumerate(channels, 1))
    rate = cut.rate if scaler else 1.0
    return HarCnn(input_shape[0], kept, cut.classes(classes), kernel=kernel, norm=norm, rate=rate)
