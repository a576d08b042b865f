"""Means over grids of several sizes, resized and concatenated.

Source: Zhao et al., "Pyramid scene parsing network", CVPR 2017.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from models import Cut, architecture


class Net(nn.Module):
    """A feature map beside its pooled selves, and a classifier."""

    def __init__(self, channels: int, narrow: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, padding=1)
        self.pools = nn.ModuleList(
            nn.Sequential(
                nn.AdaptiveAvgPool2d(size), nn.Conv2d(channels, narrow, 1), nn.GELU("tanh")
            )
            for size in (1, 2, 3)
        )
        self.join = nn.Conv2d(channels + 3 * narrow, narrow, 1)
        self.head = nn.Linear(narrow, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu()
        pooled = [
            functional.interpolate(pool(x), x.shape[2:], mode="bilinear") for pool in self.pools
        ]
        out: Tensor = self.head(self.join(torch.cat([x, *pooled], 1)).relu().mean((2, 3)))
        return out


@architecture()
def pyramid_of_pools(
    cut: Cut, *, input_shape: tuple[int, ...] = (3, 8, 8), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.width("channels", 8), cut.width("narrow", 12), cut.classes(classes))
