"""Queries, keys and values from one projection, one after another, with one head.

Source: minGPT (karpathy/minGPT, mingpt/model.py), c_attn.
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture


class Net(nn.Module):
    """One attention layer; the scores' scale does not depend on the width."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 3 * dim)
        self.out = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        weights = torch.softmax(query @ key.transpose(1, 2) * 0.3, -1)
        out: Tensor = self.out((weights @ value).mean(1))
        return out


@architecture()
def fused_qkv(cut: Cut, *, input_shape: tuple[int, ...] = (5, 8), classes: int = 4) -> nn.Module:
    """Build the model."""
    return Net(cut.width("attention", 12), cut.classes(classes))
