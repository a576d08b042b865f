"""Channels that move to other groups between layers; refused.

Source: Zhang et al., "ShuffleNet", CVPR 2018.
"""

from torch import Tensor, nn
from torch.nn import functional

from models import Cut, architecture

REFUSED = r"units of axis conv are not interchangeable.*leading=True"


class Net(nn.Module):
    """A residual layer behind a shuffle."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3)
        self.second = nn.Conv2d(channels, channels, 1)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.channel_shuffle(self.first(x), 4)
        out: Tensor = self.head((x + self.second(x)).relu().mean((2, 3)))
        return out


@architecture()
def channel_shuffle(
    cut: Cut, *, input_shape: tuple[int, ...] = (3, 6, 6), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.width("conv", 16), cut.classes(classes))
