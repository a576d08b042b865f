"""Keys and values from one projection, one after another, for pairs of query heads; whole groups are cut.

Source: Ainslie et al., "GQA: training generalized multi-query transformer models", EMNLP 2023, with
`to_kv` as in lucidrains/x-transformers.
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture

_PER_GROUP = 2
_DIM = 3


class Net(nn.Module):
    """One layer of attention."""

    def __init__(self, channels: int, groups: int, classes: int) -> None:
        super().__init__()
        self.to_q = nn.Linear(channels, groups * _PER_GROUP * _DIM)
        self.to_kv = nn.Linear(channels, 2 * groups * _DIM)
        self.head = nn.Linear(groups * _PER_GROUP * _DIM, classes)

    def forward(self, x: Tensor) -> Tensor:
        q = self.to_q(x).unflatten(2, (-1, _DIM)).transpose(1, 2)
        k, v = (
            part.unflatten(2, (-1, _DIM)).transpose(1, 2).repeat_interleave(_PER_GROUP, 1)
            for part in self.to_kv(x).chunk(2, -1)
        )
        seen = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        out: Tensor = self.head(seen.transpose(1, 2).flatten(2).mean(1))
        return out


@architecture()
def grouped_query_shared(
    cut: Cut, *, input_shape: tuple[int, ...] = (5, 6), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(input_shape[-1], cut.width("group", 4), cut.classes(classes))
