"""Group norm; all groups are kept and become thinner.

Source: Wu, He, "Group normalization", ECCV 2018; cut inside the groups.
"""

from torch import Tensor, nn

from models import Cut, architecture

ALONE = False


class Net(nn.Module):
    """Four groups at every width."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3)
        self.norm = nn.GroupNorm(4, channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.conv(x)).relu().mean((2, 3)))
        return out


@architecture()
def group_norm_inside(
    cut: Cut, *, input_shape: tuple[int, ...] = (3, 6, 6), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.heads("conv", 4, 8) * 4, cut.classes(classes))
