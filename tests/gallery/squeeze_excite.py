"""Depthwise convolution, and channels weighted by their content.

Source: Hu et al., "Squeeze-and-excitation networks", CVPR 2018; the block of MobileNetV3.
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture


class Net(nn.Module):
    """One block."""

    def __init__(self, channels: int, squeezed: int, classes: int) -> None:
        super().__init__()
        self.expand = nn.Conv2d(3, channels, 1)
        self.depthwise = nn.Conv2d(channels, channels, 3, groups=channels)
        self.squeeze = nn.Linear(channels, squeezed)
        self.excite = nn.Linear(squeezed, channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(self.expand(x).relu()).relu()
        weights = torch.sigmoid(self.excite(self.squeeze(x.mean((2, 3))).relu()))
        out: Tensor = self.head((x * weights[:, :, None, None]).mean((2, 3)))
        return out


@architecture()
def squeeze_excite(
    cut: Cut, *, input_shape: tuple[int, ...] = (3, 6, 6), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.width("channels", 16), cut.width("squeezed", 4), cut.classes(classes))
