"""Queries, keys and values from one projection, one after another within each head.

Source: Megatron-LM and GPT-NeoX (EleutherAI/gpt-neox), query_key_value.
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture


class Net(nn.Module):
    """Four heads that become thinner."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.dim = dim
        self.qkv = nn.Linear(8, 3 * 4 * dim)
        self.out = nn.Linear(4 * dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).view(-1, x.shape[1], 4, 3, self.dim).permute(3, 0, 2, 1, 4)
        weights = torch.softmax(parts[0] @ parts[1].transpose(2, 3) * 0.3, -1)
        out: Tensor = self.out((weights @ parts[2]).transpose(1, 2).flatten(2).mean(1))
        return out


@architecture()
def fused_qkv_by_head(
    cut: Cut, *, input_shape: tuple[int, ...] = (5, 8), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.heads("attention", 4, 4), cut.classes(classes))
