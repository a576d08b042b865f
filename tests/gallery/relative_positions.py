"""Attention with a learned bias per head and bucketed distance; whole heads are cut.

Source: Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text
transformer", JMLR 21, 2020, as in transformers (models/t5/modeling_t5.py).
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from models import Cut, architecture


class Net(nn.Module):
    def __init__(self, heads: int, classes: int) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(17, 8)
        self.relative_attention_bias = nn.Embedding(8, heads)
        self.q, self.k, self.v = (nn.Linear(8, heads * 3, bias=False) for _ in range(3))
        self.o = nn.Linear(heads * 3, 8, bias=False)
        self.head = nn.Linear(8, classes)

    @staticmethod
    def bucket(relative: Tensor) -> Tensor:
        buckets = (relative > 0).to(torch.long) * 4
        relative = torch.abs(relative)
        large = 2 + (torch.log(relative.float() / 2) / math.log(16 / 2) * 2).to(torch.long)
        return buckets + torch.where(
            relative < 2, relative, torch.min(large, torch.full_like(large, 3))
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        length = tokens.shape[1]
        place = torch.arange(length, dtype=torch.long)
        values = self.relative_attention_bias(self.bucket(place[None, :] - place[:, None]))
        q, k, v = (
            f(x).view(x.shape[0], length, self.heads, 3).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        weights = functional.softmax(
            q @ k.transpose(3, 2) + values.permute([2, 0, 1]).unsqueeze(0), dim=-1
        )
        x = x + self.o((weights @ v).transpose(1, 2).contiguous().view(x.shape[0], length, -1))
        out: Tensor = self.head(x.mean(1))
        return out


@architecture(input_dtype="int64")
def relative_positions(
    cut: Cut, *, input_shape: tuple[int, ...] = (6,), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.groups("head", 4), cut.classes(classes))
