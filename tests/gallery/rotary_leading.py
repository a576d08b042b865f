"""Rotary attention whose heads are cut to their leading dimensions, as the author declares; only
with static plans.

Source: Su et al., "RoFormer: enhanced transformer with rotary position embedding", Neurocomputing
2024.
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture

ALONE = False


def rotated(x: Tensor) -> Tensor:
    """Turn pairs of the first and second half of each head by an angle that grows with the
    place.
    """
    angle = torch.arange(x.shape[2])[:, None] * 10.0 ** -(torch.arange(x.shape[3] // 2) / 2)
    first, second = x.chunk(2, -1)
    return torch.cat(
        [first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], -1
    )


class Net(nn.Module):
    """One attention layer."""

    def __init__(self, heads: int, dim: int, classes: int) -> None:
        super().__init__()
        self.heads = heads
        self.dim = dim
        self.query, self.key, self.value = (nn.Linear(8, heads * dim) for _ in range(3))
        self.out = nn.Linear(heads * dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).view(-1, x.shape[1], self.heads, self.dim).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        weights = torch.softmax(rotated(query) @ rotated(key).transpose(2, 3) * 0.5, -1)
        out: Tensor = self.out((weights @ value).transpose(1, 2).flatten(2).mean(1))
        return out


@architecture()
def rotary_leading(
    cut: Cut, *, input_shape: tuple[int, ...] = (5, 8), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(4, cut.heads("attention", 4, 8, leading=True), cut.classes(classes))
