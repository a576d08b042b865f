"""A block of a vision transformer with one projection for queries, keys and values; whole heads are
cut.

Source: timm (huggingface/pytorch-image-models, timm/models/vision_transformer.py), Attention and
Block.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from models import Cut, architecture


class Net(nn.Module):
    """The residual stream stays whole, so that its norms do."""

    def __init__(self, heads: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Linear(8, 16)
        self.norm1 = nn.LayerNorm(16)
        self.norm2 = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 3 * heads * 4)
        self.proj = nn.Linear(heads * 4, 16)
        self.fc1 = nn.Linear(16, hidden)
        self.fc2 = nn.Linear(hidden, 16)
        self.head = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        parts = (
            self.qkv(self.norm1(x)).view(-1, x.shape[1], 3, self.heads, 4).permute(2, 0, 3, 1, 4)
        )
        weights = torch.softmax(parts[0] @ parts[1].transpose(2, 3) * 0.5, -1)
        x = x + self.proj((weights @ parts[2]).transpose(1, 2).flatten(2))
        out: Tensor = self.head((x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))).mean(1))
        return out


@architecture()
def vit_block(cut: Cut, *, input_shape: tuple[int, ...] = (5, 8), classes: int = 4) -> nn.Module:
    """Build the model."""
    return Net(cut.groups("head", 4), cut.width("hidden", 24), cut.classes(classes))
