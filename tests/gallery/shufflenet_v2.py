"""Blocks that transform half of the channels, then shuffle both halves; refused.

Source: Ma et al., "ShuffleNet V2", ECCV 2018, as in torchvision (models/shufflenetv2.py).
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture

REFUSED = r"units of axis half are not interchangeable.*leading=True"


class Block(nn.Module):
    def __init__(self, half: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(half, half, 1), nn.ReLU(), nn.Conv2d(half, half, 3, padding=1, groups=half)
        )

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, dim=1)
        out = torch.cat((x1, self.branch(x2)), dim=1)
        b, c, h, w = out.size()
        return out.view(b, 2, c // 2, h, w).transpose(1, 2).contiguous().view(b, c, h, w)


@architecture()
def shufflenet_v2(
    cut: Cut, *, input_shape: tuple[int, ...] = (3, 6, 6), classes: int = 4
) -> nn.Module:
    """Build the model."""
    half = cut.width("half", 4)
    return nn.Sequential(
        nn.Conv2d(3, 2 * half, 3),
        Block(half),
        Block(half),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * half, cut.classes(classes)),
    )
