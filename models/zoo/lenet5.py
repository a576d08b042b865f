"""LeNet-5 with ReLU and max-pooling.

LeCun, Bottou, Bengio, Haffner: "Gradient-based learning applied to document recognition", Proc.
IEEE 1998.
"""

import torch
from torch import Tensor, nn

from fleet_protocol.errors import ConfigError
from models.architecture import architecture
from models.cut import Cut
from models.zoo.layers import Scaler, zero_linear_biases

_KERNEL = 5
_PADDING = 2  # the paper pads 28x28 digits to 32x32


class LeNet5(nn.Module):
    """Two convolutions with pooling, three linear layers."""

    def __init__(
        self,
        input_shape: tuple[int, ...],
        sizes: tuple[int, ...],
        classes: int,
        rate: float,
    ) -> None:
        """Make the network for samples (channels, height, width).

        Args:
            input_shape: shape of a sample.
            sizes: outputs of the two convolutions and of the two hidden layers.
            classes: number of logits.
            rate: width share for the Scalers; 1 for none.
        """
        super().__init__()
        height, width = (_pooled(side) for side in input_shape[1:])
        self.conv1 = nn.Conv2d(input_shape[0], sizes[0], _KERNEL, padding=_PADDING)
        self.conv2 = nn.Conv2d(sizes[0], sizes[1], _KERNEL)
        self.fc1 = nn.Linear(sizes[1] * height * width, sizes[2])
        self.fc2 = nn.Linear(sizes[2], sizes[3])
        self.head = nn.Linear(sizes[3], classes)
        self.scaler = Scaler(rate)
        zero_linear_biases(self)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits, float32 [batch, classes], of float32 [batch, channels, height, width]."""
        x = torch.max_pool2d(self.scaler(self.conv1(x)).relu(), 2)
        x = torch.max_pool2d(self.scaler(self.conv2(x)).relu(), 2)
        x = self.scaler(self.fc1(x.flatten(1))).relu()
        x = self.scaler(self.fc2(x)).relu()
        logits: Tensor = self.head(x)
        return logits


def _pooled(size: int) -> int:
    """Return what two convolutions and two poolings leave of a side."""
    # The first convolution keeps the sides, the second one has no padding.
    left = (size // 2 - _KERNEL + 1) // 2
    if left < 1:
        raise ConfigError(f"input_shape: a side of {size} is too small, LeNet-5 needs at least 12")
    return left


@architecture(paper="Proc. IEEE 86(11), 1998")
def lenet5(
    cut: Cut,
    *,
    input_shape: tuple[int, int, int] = (1, 28, 28),
    classes: int = 10,
    channels: tuple[int, int] = (6, 16),
    hidden: tuple[int, int] = (120, 84),
    scaler: bool = True,
) -> LeNet5:
    """Build LeNet-5; all hidden layers are cut by width."""
    sizes = (*cut.widths("conv", channels), *cut.widths("fc", hidden))
    return LeNet5(input_shape, sizes, cut.classes(classes), cut.rate if scaler else 1.0)
