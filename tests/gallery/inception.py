"""Four branches of convolutions and a pool, concatenated.

Source: Szegedy et al., "Going deeper with convolutions", CVPR 2015.
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture


class Net(nn.Module):
    def __init__(self, one: int, three: int, five: int, pooled: int, classes: int) -> None:
        super().__init__()
        self.branch1 = nn.Conv2d(3, one, 1)
        self.branch3 = nn.Sequential(
            nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, three, 3, padding=1)
        )
        self.branch5 = nn.Sequential(
            nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, five, 5, padding=2)
        )
        self.branch_pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(3, pooled, 1))
        self.mix = nn.Conv2d(one + three + five + pooled, 8, 1)
        self.fc = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat(
            [self.branch1(x), self.branch3(x), self.branch5(x), self.branch_pool(x)], 1
        ).relu()
        out: Tensor = self.fc(self.mix(x).relu().mean((2, 3)))
        return out


@architecture()
def inception(cut: Cut, *, input_shape: tuple[int, ...] = (3, 6, 6), classes: int = 4) -> nn.Module:
    """Build the model."""
    return Net(*cut.widths("branch", (4, 6, 3, 5)), cut.classes(classes))
