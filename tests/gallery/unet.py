"""An encoder's skip connections, concatenated with upsampled feature maps of another axis.

Source: Ronneberger et al., "U-Net: convolutional networks for biomedical image segmentation",
MICCAI 2015.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from models import Cut, architecture


class Net(nn.Module):
    """Two levels and a classifier."""

    def __init__(self, first: int, second: int, classes: int) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(3, first, 3, padding=1)
        self.down2 = nn.Conv2d(first, second, 3, padding=1)
        self.up = nn.Conv2d(second + first, first, 3, padding=1)
        self.head = nn.Linear(first, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down1(x).relu()
        below = functional.interpolate(
            self.down2(functional.avg_pool2d(x, 2)).relu(), scale_factor=2.0
        )
        out: Tensor = self.head(self.up(torch.cat([below, x], 1)).relu().mean((2, 3)))
        return out


@architecture()
def unet(cut: Cut, *, input_shape: tuple[int, ...] = (3, 8, 8), classes: int = 4) -> nn.Module:
    """Build the model."""
    return Net(cut.width("first", 8), cut.width("second", 12), cut.classes(classes))
