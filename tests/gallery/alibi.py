"""Attention scores that fall with distance, at a fixed rate for each head; refused, because the
rates of the heads differ.

Source: Press, Smith, Lewis, "Train short, test long", ICLR 2022.
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture

REFUSED = (
    r"units of axis head are not interchangeable.*module out \(Linear\); declare it with "
    r"leading=True"
)


class Net(nn.Module):
    """One attention layer of heads with four dimensions each."""

    slopes: Tensor

    def __init__(self, heads: int, classes: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(8, heads * 4) for _ in range(3))
        self.out = nn.Linear(heads * 4, classes)
        self.register_buffer("slopes", torch.tensor([2.0 ** -(head + 1) for head in range(heads)]))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            layer(x).view(batch, length, self.heads, 4).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        distance = torch.arange(length)[None] - torch.arange(length)[:, None]
        weights = (query @ key.transpose(2, 3) / 2 + distance * self.slopes[:, None, None]).softmax(
            -1
        )
        out: Tensor = self.out((weights @ value).transpose(1, 2).flatten(2).mean(1))
        return out


@architecture()
def alibi(cut: Cut, *, input_shape: tuple[int, ...] = (6, 8), classes: int = 4) -> nn.Module:
    """Build the model."""
    return Net(cut.groups("head", 4), cut.classes(classes))
