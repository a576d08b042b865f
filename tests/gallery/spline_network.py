"""A learned function on every edge: a mixture of bumps over a grid for each pair of units.

Source: Liu et al., "KAN: Kolmogorov-Arnold networks", ICLR 2025, with Gaussian bumps in place of
splines.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from models import Cut, architecture


class Edges(nn.Module):
    grid: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.bumps = nn.Parameter(0.1 * torch.randn(outputs, inputs, 4))
        self.register_buffer("grid", torch.linspace(-2, 2, 4))

    def forward(self, x: Tensor) -> Tensor:
        near = torch.exp(-((x.unsqueeze(-1) - self.grid) ** 2))
        out: Tensor = self.base(functional.silu(x)) + torch.einsum("bik,oik->bo", near, self.bumps)
        return out


@architecture()
def spline_network(cut: Cut, *, input_shape: tuple[int, ...] = (5,), classes: int = 3) -> nn.Module:
    """Build the model."""
    hidden = cut.width("hidden", 8)
    return nn.Sequential(Edges(5, hidden), Edges(hidden, cut.classes(classes)))
