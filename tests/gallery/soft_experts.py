"""Experts in one tensor, weighted by a router; the width of the experts is cut, not their number.

Source: Jacobs et al., "Adaptive mixtures of local experts", Neural Computation 3, 1991; Puigcerver
et al., ICLR 2024.
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture


class Net(nn.Module):
    """Three experts of two layers beside a residual stream."""

    def __init__(self, stream: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.enter = nn.Linear(6, stream)
        self.router = nn.Linear(stream, 3)
        self.head = nn.Linear(stream, classes)
        self.up = nn.Parameter(0.4 * torch.randn(3, stream, hidden))
        self.down = nn.Parameter(0.4 * torch.randn(3, hidden, stream))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        hidden = torch.einsum("bd,ndf->bnf", x, self.up).relu()
        experts = torch.einsum("bnf,nfd->bnd", hidden, self.down)
        out: Tensor = self.head(x + (self.router(x).softmax(-1).unsqueeze(-1) * experts).sum(1))
        return out


@architecture()
def soft_experts(cut: Cut, *, input_shape: tuple[int, ...] = (6,), classes: int = 4) -> nn.Module:
    """Build the model."""
    return Net(cut.width("stream", 8), cut.width("hidden", 12), cut.classes(classes))
