"""A grouped convolution whose groups are kept or removed as a whole.

Source: Xie et al., "Aggregated residual transformations for deep neural networks", CVPR 2017.
"""

from torch import Tensor, nn

from models import Cut, architecture


class Net(nn.Module):
    """Paths of four channels."""

    def __init__(self, paths: int, classes: int) -> None:
        super().__init__()
        width = paths * 4
        self.first = nn.Conv2d(3, width, 1)
        self.grouped = nn.Conv2d(width, width, 3, groups=paths)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.grouped(self.first(x).relu()).relu().mean((2, 3)))
        return out


@architecture()
def resnext_whole(
    cut: Cut, *, input_shape: tuple[int, ...] = (3, 6, 6), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.groups("path", 4), cut.classes(classes))
