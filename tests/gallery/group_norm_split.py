"""Group norm whose channels are cut without regard to the groups; refused.

Source: the README of many repositories that replace BatchNorm with GroupNorm(4, channels).
"""

from torch import Tensor, nn

from models import Cut, architecture

REFUSED = (
    r"units of axis conv are not .*norm\.weight.*module norm "
    r"\(GroupNorm\).*cut\.heads\('conv', 4, 8\) \* 4"
)


class Net(nn.Module):
    """At half the width, groups would be of other channels."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3)
        self.norm = nn.GroupNorm(4, channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.conv(x)).relu().mean((2, 3)))
        return out


@architecture()
def group_norm_split(
    cut: Cut, *, input_shape: tuple[int, ...] = (3, 6, 6), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.width("conv", 32), cut.classes(classes))
