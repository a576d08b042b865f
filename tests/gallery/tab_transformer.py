"""Categories as tokens of a transformer, flattened and concatenated with numbers; only the inside
of heads is cut.

Source: Huang et al., "TabTransformer: tabular data modeling using contextual embeddings", 2020.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from models import Cut, architecture

ALONE = False
SHAPES: Mapping[str, tuple[int, ...]] = {"categories": (3,), "numbers": (4,)}


class Net(nn.Module):
    """A table of embeddings for each column, and one block of attention over the columns."""

    def __init__(self, width: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.columns = nn.ModuleList([nn.Embedding(7, width) for _ in range(3)])
        self.block = nn.TransformerEncoderLayer(width, 2, hidden, dropout=0.0, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(3 * width + 4, classes)

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        tokens = torch.stack([column(categories[:, i]) for i, column in enumerate(self.columns)], 1)
        out: Tensor = self.head(torch.cat([self.block(tokens).flatten(1), self.norm(numbers)], 1))
        return out


@architecture(input_dtype={"categories": "int64"})
def tab_transformer(
    cut: Cut, *, input_shape: Mapping[str, tuple[int, ...]] = SHAPES, classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.heads("stream", 2, 4) * 2, cut.width("hidden", 16), cut.classes(classes))
