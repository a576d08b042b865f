"""A grouped convolution whose groups are all kept and become thinner.

Source: Xie et al., "Aggregated residual transformations for deep neural networks", CVPR 2017.
"""

from torch import Tensor, nn

from models import Cut, architecture


class Net(nn.Module):
    """Four paths at every width."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 1)
        self.grouped = nn.Conv2d(channels, channels, 3, groups=4)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.grouped(self.first(x).relu()).relu().mean((2, 3)))
        return out


@architecture()
def resnext_inside(
    cut: Cut, *, input_shape: tuple[int, ...] = (3, 6, 6), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.heads("path", 4, 4) * 4, cut.classes(classes))
