"""A gated feed-forward layer whose gate and values come from one projection.

Source: Shazeer, "GLU variants improve transformer", arXiv 2002.05202.
"""

from torch import Tensor, nn
from torch.nn import functional

from models import Cut, architecture


class Net(nn.Module):
    """SwiGLU with a fused projection."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.up = nn.Linear(8, 2 * hidden)
        self.down = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        out: Tensor = self.down(functional.silu(gate) * value)
        return out


@architecture()
def gated_linear_unit(
    cut: Cut, *, input_shape: tuple[int, ...] = (8,), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.width("hidden", 12), cut.classes(classes))
