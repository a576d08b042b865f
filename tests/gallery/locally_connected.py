"""A convolution with separate weights at every position, by unfolding the feature map.

Source: Taigman et al., "DeepFace", CVPR 2014.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from models import Cut, architecture


class Net(nn.Module):
    def __init__(self, channels: int, local: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, channels, 3)
        self.weight = nn.Parameter(torch.randn(local, channels * 4, 9) * 0.2)
        self.bias = nn.Parameter(torch.zeros(local, 9))
        self.fc = nn.Linear(local * 9, classes)

    def forward(self, x: Tensor) -> Tensor:
        patches = functional.unfold(self.conv(x).relu(), 2)
        local = torch.einsum("bkp,okp->bop", patches, self.weight) + self.bias
        out: Tensor = self.fc(local.relu().flatten(1))
        return out


@architecture()
def locally_connected(
    cut: Cut, *, input_shape: tuple[int, ...] = (1, 6, 6), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.width("conv", 4), cut.width("local", 6), cut.classes(classes))
