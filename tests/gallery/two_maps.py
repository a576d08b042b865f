"""Two concatenated feature maps with the same axis, such as average and maximum pools.

Source: fastai's concat pooling (fastai/fastai, layers.py, AdaptiveConcatPool2d).
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture


class Net(nn.Module):
    """Mean and maximum of each channel, one after another."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3)
        self.head = nn.Linear(2 * channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu()
        out: Tensor = self.head(torch.cat([x.mean((2, 3)), x.amax((2, 3))], 1))
        return out


@architecture()
def two_maps(cut: Cut, *, input_shape: tuple[int, ...] = (3, 6, 6), classes: int = 4) -> nn.Module:
    """Build the model."""
    return Net(cut.width("conv", 12), cut.classes(classes))
