"""A fixed table added to the residual stream; refused, because each dimension has its own
frequency.

Source: Vaswani et al., "Attention is all you need", NeurIPS 2017, section 3.5.
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture

REFUSED = r"units of axis stream are not interchangeable.*leading=True"


class Net(nn.Module):
    """A layer over the sum of tokens and table."""

    table: Tensor

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, dim)
        self.layer = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, classes)
        self.register_buffer(
            "table", torch.sin(torch.arange(5)[:, None] * torch.arange(dim)[None] / 3.0)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.embed(x) + self.table).relu().mean(1))
        return out


@architecture()
def sinusoid_table(
    cut: Cut, *, input_shape: tuple[int, ...] = (5, 8), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.width("stream", 12), cut.classes(classes))
