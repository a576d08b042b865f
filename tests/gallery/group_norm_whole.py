"""Group norm whose groups are kept or removed as a whole.

Source: Wu, He, "Group normalization", ECCV 2018; groups of eight channels at every width.
"""

from torch import Tensor, nn

from models import Cut, architecture


class Net(nn.Module):
    """As many groups as the width leaves."""

    def __init__(self, groups: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, groups * 8, 3)
        self.norm = nn.GroupNorm(groups, groups * 8)
        self.head = nn.Linear(groups * 8, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.conv(x)).relu().mean((2, 3)))
        return out


@architecture()
def group_norm_whole(
    cut: Cut, *, input_shape: tuple[int, ...] = (3, 6, 6), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.groups("conv", 4), cut.classes(classes))
