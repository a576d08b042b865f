"""An encoder of strided convolutions and a decoder of transposed convolutions.

Source: Radford, Metz, Chintala, "Unsupervised representation learning with deep convolutional
GANs", ICLR 2016.
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture


class Net(nn.Module):
    """Down twice, up twice, and a classifier of the means."""

    def __init__(self, first: int, second: int, classes: int) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(3, first, 3, 2, 1)
        self.down2 = nn.Conv2d(first, second, 3, 2, 1)
        self.up1 = nn.ConvTranspose2d(second, first, 4, 2, 1)
        self.up2 = nn.ConvTranspose2d(first, first, 2, 2)
        self.head = nn.Linear(first, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down2(torch.relu(self.down1(x))).relu()
        out: Tensor = self.head(torch.tanh(self.up2(torch.relu(self.up1(x)))).mean((2, 3)))
        return out


@architecture()
def transposed_decoder(
    cut: Cut, *, input_shape: tuple[int, ...] = (3, 8, 8), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.width("first", 8), cut.width("second", 12), cut.classes(classes))
