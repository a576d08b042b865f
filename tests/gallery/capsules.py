"""Capsules with routing by agreement; whole capsules are cut, and routing uses the remaining ones.

Source: Sabour, Frosst, Hinton, "Dynamic routing between capsules", NeurIPS 2017.
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture


def squashed(x: Tensor) -> Tensor:
    """Vectors shortened to less than 1."""
    square = (x * x).sum(-1, keepdim=True)
    return x * square / (1 + square) / torch.sqrt(square + 1e-8)


class Net(nn.Module):
    """Two convolutions, capsules of four numbers, and two rounds of routing to one capsule for each
    label.
    """

    def __init__(self, channels: int, capsules: int, classes: int) -> None:
        super().__init__()
        self.capsules = capsules
        self.first = nn.Conv2d(1, channels, 3)
        self.second = nn.Conv2d(channels, capsules * 4, 3, stride=2)
        self.votes = nn.Parameter(0.3 * torch.randn(classes, capsules, 3, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).relu())
        x = squashed(x.view(x.shape[0], self.capsules, 4, -1).transpose(2, 3))
        votes = torch.einsum("kcod,bcnd->bkcno", self.votes, x).flatten(2, 3)
        agreed = torch.zeros_like(votes[..., 0])
        for _ in range(2):
            found = squashed((agreed.softmax(1).unsqueeze(-1) * votes).sum(2))
            agreed = agreed + (votes * found.unsqueeze(2)).sum(-1)
        return found.norm(dim=-1)


@architecture()
def capsules(cut: Cut, *, input_shape: tuple[int, ...] = (1, 7, 7), classes: int = 3) -> nn.Module:
    """Build the model."""
    return Net(cut.width("channels", 6), cut.groups("capsules", 4), cut.classes(classes))
