"""A feature map split in two; one half passes through a layer and is added to the other.

Source: the split of ShuffleNet V2 (Ma et al., ECCV 2018) and of C2f blocks, without a shuffle.
"""

from torch import Tensor, nn

from models import Cut, architecture


class Net(nn.Module):
    """Both halves are maps of one axis."""

    def __init__(self, half: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 2 * half, 3)
        self.second = nn.Conv2d(half, half, 1)
        self.head = nn.Linear(half, classes)

    def forward(self, x: Tensor) -> Tensor:
        kept, changed = self.first(x).relu().chunk(2, 1)
        out: Tensor = self.head((kept + self.second(changed)).relu().mean((2, 3)))
        return out


@architecture()
def channel_split(
    cut: Cut, *, input_shape: tuple[int, ...] = (3, 6, 6), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.width("half", 12), cut.classes(classes))
