"""One encoder for the two images of a sample, and a classifier over the distance between
their features.

Source: Koch, Zemel, Salakhutdinov, "Siamese neural networks for one-shot image recognition", ICML
workshop 2015.
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture


class Net(nn.Module):
    def __init__(self, channels: int, dim: int, classes: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, channels, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(channels * 4, dim),
        )
        self.fc = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        left = self.encoder(x[:, :1])
        right = self.encoder(x[:, 1:])
        out: Tensor = self.fc(torch.abs(left.sigmoid() - right.sigmoid()))
        return out


@architecture()
def siamese(cut: Cut, *, input_shape: tuple[int, ...] = (2, 6, 6), classes: int = 2) -> nn.Module:
    """Build the model."""
    return Net(cut.width("channels", 6), cut.width("dim", 8), cut.classes(classes))
