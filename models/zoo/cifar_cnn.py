"""The two CIFAR networks of specification 5.6, CNN1 and CNN2.

Devices with other tasks may share their convolutions.

The paper (Shen et al., 2020, arXiv:2006.16765) gives the channels; the specification decides the
rest: padding 1, one hidden layer of 120 units in CNN1, none in CNN2.
"""

import torch
from torch import Tensor, nn

from fleet_protocol.errors import ConfigError
from models.architecture import architecture
from models.cut import Cut
from models.zoo.layers import Scaler, zero_linear_biases


class PooledCnn(nn.Module):
    """3x3 convolutions, each with max-pooling and ReLU, then linear layers with ReLU between them.

    The convolutions are the trunk that several tasks can share, with the linear layers as each
    task's adaptor.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        channels: tuple[int, ...],
        hidden: tuple[int, ...],
        classes: int,
        rate: float,
    ) -> None:
        """Make the network for samples (channels, height, width).

        Raises:
            ConfigError: there is no convolution, or pooling leaves no pixel.
        """
        super().__init__()
        if not channels:
            raise ConfigError("channels is empty; name the channels of at least one convolution")
        # Each of the poolings halves the sides, and leaves out an odd last pixel.
        height, width = (side >> len(channels) for side in input_shape[1:])
        if min(height, width) < 1:
            raise ConfigError(
                f"input_shape {input_shape} is too small for {len(channels)} poolings"
            )
        inputs = input_shape[0]
        self.trunk = nn.ModuleList()
        for outputs in channels:
            self.trunk.append(nn.Conv2d(inputs, outputs, 3, padding=1))
            inputs = outputs
        inputs = channels[-1] * height * width
        self.hidden = nn.ModuleList()
        for outputs in hidden:
            self.hidden.append(nn.Linear(inputs, outputs))
            inputs = outputs
        self.head = nn.Linear(inputs, classes)
        self.scaler = Scaler(rate)
        zero_linear_biases(self)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits, float32 [batch, classes], of float32 [batch, channels, height, width]."""
        for convolution in self.trunk:
            x = torch.max_pool2d(self.scaler(convolution(x)), 2).relu()
        x = x.flatten(1)
        for layer in self.hidden:
            x = self.scaler(layer(x)).relu()
        logits: Tensor = self.head(x)
        return logits


@architecture(paper="arXiv:2006.16765 (CNN1 of the CIFAR experiments)")
def cnn1(
    cut: Cut,
    *,
    input_shape: tuple[int, int, int] = (3, 32, 32),
    classes: int = 10,
    channels: tuple[int, ...] = (6, 16),
    hidden: tuple[int, ...] = (120,),
    scaler: bool = True,
) -> PooledCnn:
    """Build CNN1, two convolutions and two linear layers; all hidden layers are cut by width."""
    kept = cut.widths("conv", channels)
    units = cut.widths("fc", hidden)
    return PooledCnn(input_shape, kept, units, cut.classes(classes), cut.rate if scaler else 1.0)


@architecture(paper="arXiv:2006.16765 (CNN2 of the CIFAR experiments)")
def cnn2(
    cut: Cut,
    *,
    input_shape: tuple[int, int, int] = (3, 32, 32),
    classes: int = 10,
    channels: tuple[int, ...] = (128, 128, 128),
    hidden: tuple[int, ...] = (),
    scaler: bool = True,
) -> PooledCnn:
    """Build CNN2, three convolutions of 128 channels and one linear layer.

    All hidden layers are cut by width.
    """
    kept = cut.widths("conv", channels)
    units = cut.widths("fc", hidden)
    return PooledCnn(input_shape, kept, units, cut.classes(classes), cut.rate if scaler else 1.0)
