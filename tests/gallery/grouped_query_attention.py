"""Two key and value heads for four query heads; all heads become thinner.

Source: Ainslie et al., "GQA: training generalized multi-query transformer models", EMNLP 2023.
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture


class Net(nn.Module):
    """One attention layer."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.dim = dim
        self.query, self.key, self.value = (nn.Linear(8, heads * dim) for heads in (4, 2, 2))
        self.out = nn.Linear(4 * dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).view(-1, x.shape[1], heads, self.dim).transpose(1, 2)
            for layer, heads in ((self.query, 4), (self.key, 2), (self.value, 2))
        )
        key, value = (torch.stack([part, part], 2).flatten(1, 2) for part in (key, value))
        weights = torch.softmax(query @ key.transpose(2, 3) * 0.5, -1)
        out: Tensor = self.out((weights @ value).transpose(1, 2).flatten(2).mean(1))
        return out


@architecture()
def grouped_query_attention(
    cut: Cut, *, input_shape: tuple[int, ...] = (5, 8), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.heads("attention", 4, 4), cut.classes(classes))
