"""Embedded categories, numbers that pass through a network, and the products of all pairs.

Source: Naumov et al., "Deep learning recommendation model for personalization and recommendation
systems", 2019.
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture


class Net(nn.Module):
    def __init__(self, dim: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, dim) for rows in (7, 5, 3))
        self.bottom = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, dim))
        self.top = nn.Linear(6 + dim, classes)
        self.pairs = torch.triu_indices(4, 4, 1)  # no buffer, as many write it

    def forward(self, x: Tensor) -> Tensor:
        numbers = self.bottom(x[:, :4])
        tokens = x[:, 4:].long()
        found = [
            table(tokens[:, place] % len(table.weight)) for place, table in enumerate(self.tables)
        ]
        vectors = torch.stack([numbers, *found], 1)
        products = (vectors @ vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        out: Tensor = self.top(torch.cat([products, numbers], 1))
        return out


@architecture()
def recommender(cut: Cut, *, input_shape: tuple[int, ...] = (7,), classes: int = 2) -> nn.Module:
    """Build the model."""
    return Net(cut.width("dim", 6), cut.width("hidden", 8), cut.classes(classes))
