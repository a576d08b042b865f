"""A network that rotates and shifts an image depending on its content, then classifies it.

Source: Jaderberg et al., "Spatial transformer networks", NeurIPS 2015, as in PyTorch's tutorial.
"""

from torch import Tensor, nn
from torch.nn import functional

from models import Cut, architecture


class Net(nn.Module):
    def __init__(self, hidden: int, channels: int, classes: int) -> None:
        super().__init__()
        self.place = nn.Sequential(
            nn.Flatten(), nn.Linear(36, hidden), nn.Tanh(), nn.Linear(hidden, 6)
        )
        self.conv = nn.Conv2d(1, channels, 3)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        grid = functional.affine_grid(
            self.place(x).view(-1, 2, 3), list(x.shape), align_corners=False
        )
        x = functional.grid_sample(x, grid, align_corners=False)
        out: Tensor = self.fc(self.conv(x).relu().mean((2, 3)))
        return out


@architecture()
def spatial_transformer(
    cut: Cut, *, input_shape: tuple[int, ...] = (1, 6, 6), classes: int = 3
) -> nn.Module:
    """Build the model."""
    return Net(cut.width("hidden", 8), cut.width("channels", 6), cut.classes(classes))
