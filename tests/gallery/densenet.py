"""Each layer takes the image and all earlier feature maps, so its input concatenates many axes.

Source: Huang et al., "Densely connected convolutional networks", CVPR 2017.
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture


class Net(nn.Module):
    """A dense block without norms."""

    def __init__(self, growth: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv2d(3 + sum(growth[:number]), channels, 3, padding=1)
            for number, channels in enumerate(growth)
        )
        self.head = nn.Linear(3 + sum(growth), classes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x).relu()], 1)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


@architecture()
def densenet(cut: Cut, *, input_shape: tuple[int, ...] = (3, 6, 6), classes: int = 4) -> nn.Module:
    """Build the model."""
    return Net(cut.widths("layer", (6, 4, 5, 7)), cut.classes(classes))
