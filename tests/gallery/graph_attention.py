"""Attention of each node over its neighbours, in a graph given as a dense matrix
alongside the features.

Source: Velickovic et al., "Graph attention networks", ICLR 2018.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from models import Cut, architecture


class Net(nn.Module):
    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.project = nn.Linear(3, 2 * dim, bias=False)
        self.left = nn.Parameter(torch.randn(2, dim))
        self.right = nn.Parameter(torch.randn(2, dim))
        self.fc = nn.Linear(2 * dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        near = x[..., 3:] > 0
        heads = self.project(x[..., :3]).unflatten(-1, (2, -1))
        scores = (heads * self.left).sum(-1).unsqueeze(2) + (heads * self.right).sum(-1).unsqueeze(
            1
        )
        shares = (
            functional.leaky_relu(scores, 0.2).masked_fill(~near.unsqueeze(-1), -1e9).softmax(2)
        )
        mixed = torch.einsum("bijh,bjhd->bihd", shares, heads).flatten(2)
        out: Tensor = self.fc(functional.elu(mixed).mean(1))
        return out


@architecture()
def graph_attention(
    cut: Cut, *, input_shape: tuple[int, ...] = (4, 7), classes: int = 3
) -> nn.Module:
    """Build the model."""
    return Net(cut.heads("attention", 2, 6), cut.classes(classes))
