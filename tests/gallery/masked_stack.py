"""A causal stack of PyTorch's encoder layers, with words as the first dimension and one dropout
layer used twice.

Source: PyTorch's tutorial "Language modeling with nn.Transformer and torchtext", with depth rates
as in timm.
"""

import math

import torch
from torch import Tensor, nn

from models import Cut, architecture

ALONE = False
CONVERT = True


class DropPath(nn.Module):
    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.drop_prob == 0:
            return x
        kept = 1 - self.drop_prob
        return x * x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(kept) / kept


class Net(nn.Module):
    def __init__(self, embed: int, hidden: int, classes: int, words: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, embed)
        self.places = nn.Parameter(torch.randn(words, 1, embed) * 0.1)
        self.dropout = nn.Dropout(0.1)
        layer = nn.TransformerEncoderLayer(embed, 2, hidden, dropout=0.1)
        self.stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.depth = nn.ModuleList(DropPath(rate.item()) for rate in torch.linspace(0, 0.2, 2))
        self.extra = nn.ModuleList(nn.Linear(embed, embed) for _ in range(2))
        self.head = nn.Linear(embed, classes)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.tokens(x.t()) * math.sqrt(self.tokens.embedding_dim) + self.places)
        y = self.stack(y, nn.Transformer.generate_square_subsequent_mask(len(y))).transpose(0, 1)
        for layer, depth in zip(self.extra, self.depth, strict=True):
            y = y + depth(layer(y))
        return self.head(self.dropout(y))  # type: ignore[no-any-return]


@architecture(input_dtype="int64")
def masked_stack(cut: Cut, *, input_shape: tuple[int, ...] = (5,), classes: int = 11) -> nn.Module:
    """Build the model."""
    return Net(
        cut.heads("embed", 2, 4) * 2, cut.width("hidden", 6), cut.classes(classes), input_shape[0]
    )
