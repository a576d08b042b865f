"""A feature map flattened with its channels last.

Source: models written for TensorFlow, in which Flatten follows channels-last convolutions.
"""

from torch import Tensor, nn

from models import Cut, architecture


class Net(nn.Module):
    """A convolution and a classifier over (row, column, channel)."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, channels, 3, padding=1)
        self.head = nn.Linear(channels * 16, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.conv(x).relu().permute(0, 2, 3, 1).flatten(1))
        return out


@architecture()
def channel_last_flatten(
    cut: Cut, *, input_shape: tuple[int, ...] = (1, 4, 4), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.width("conv", 12), cut.classes(classes))
