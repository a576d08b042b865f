"""Two views of a sample, multiplied by PyTorch's bilinear layer, next to a gated unit.

Source: Kim et al., "Hadamard product for low-rank bilinear pooling", ICLR 2017.
"""

from torch import Tensor, nn
from torch.nn import functional

from models import Cut, architecture


class Net(nn.Module):
    def __init__(self, left: int, right: int, fused: int, classes: int) -> None:
        super().__init__()
        self.left = nn.Linear(5, left)
        self.right = nn.Sequential(nn.Linear(4, 2 * right), nn.GLU())
        self.bilinear = nn.Bilinear(left, right, fused)
        self.fc = nn.Linear(fused, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(
            functional.celu(self.bilinear(self.left(x[:, :5]), self.right(x[:, 5:])))
        )
        return out


@architecture()
def bilinear_fusion(
    cut: Cut, *, input_shape: tuple[int, ...] = (9,), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(*cut.widths("part", (4, 6, 8)), cut.classes(classes))
