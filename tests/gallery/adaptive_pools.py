"""Adaptive max and mean pools over grids that do not divide the feature map evenly, then repeated
feature maps.

Source: He et al., "Spatial pyramid pooling in deep convolutional networks", TPAMI 37, 2015.
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture


class Net(nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3)
        self.act = nn.PReLU(channels)
        self.most = nn.AdaptiveMaxPool2d((3, 2))
        self.mean = nn.AdaptiveAvgPool2d(2)
        self.fc = nn.Linear(channels * 10, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.conv(x))
        out: Tensor = self.fc(torch.cat([self.most(x).flatten(1), self.mean(x).flatten(1)], 1))
        return out


@architecture()
def adaptive_pools(
    cut: Cut, *, input_shape: tuple[int, ...] = (3, 9, 9), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.width("channels", 6), cut.classes(classes))
