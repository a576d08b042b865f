"""A depthwise convolution, a norm over the channels and two layers with the channels last, scaled
per channel.

Source: Liu et al., "A ConvNet for the 2020s", CVPR 2022, as in torchvision (models/convnext.py).
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture

ALONE = False


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(0.1 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        out: Tensor = x + (self.gamma * self.pwconv2(self.act(self.pwconv1(y)))).permute(0, 3, 1, 2)
        return out


class Net(nn.Module):
    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, dim, 2, 2)
        self.block = Block(dim)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.block(self.stem(x)).mean([-2, -1])))
        return out


@architecture()
def convnext(cut: Cut, *, input_shape: tuple[int, ...] = (3, 8, 8), classes: int = 4) -> nn.Module:
    """Build the model."""
    return Net(cut.width("dim", 8), cut.classes(classes))
