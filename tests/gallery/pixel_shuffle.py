"""Channels that are rearranged into pixels; the model predicts a number for each pixel.

Source: Shi et al., "Real-time single image and video super-resolution using an efficient sub-pixel
convolutional neural network", CVPR 2016.
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture


class Net(nn.Module):
    def __init__(self, first: int, second: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, first, 5, 1, 2)
        self.conv2 = nn.Conv2d(first, second * 4, 3, 1, 1)
        self.pixel_shuffle = nn.PixelShuffle(2)
        self.conv3 = nn.Conv2d(second, classes, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pixel_shuffle(torch.tanh(self.conv2(torch.tanh(self.conv1(x)))))
        out: Tensor = self.conv3(x)
        return out


@architecture()
def pixel_shuffle(
    cut: Cut, *, input_shape: tuple[int, ...] = (1, 4, 4), classes: int = 3
) -> nn.Module:
    """Build the model."""
    return Net(cut.width("first", 6), cut.width("second", 4), cut.classes(classes))
