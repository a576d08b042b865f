"""ViT-tiny: 12 layers of three heads over patches of 16 x 16.

Dosovitskiy et al., "An image is worth 16x16 words", ICLR 2021, in the size of Touvron et al.,
"Training data-efficient image transformers", ICML 2021.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from models import Cut, architecture

_PATCH = 16
_HEAD = 64
_HEADS = 3
_LAYERS = 12


class Layer(nn.Module):
    """Attention and two layers, each behind a norm and added."""

    def __init__(self, heads: int, hidden: int) -> None:
        super().__init__()
        width = heads * _HEAD
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, hidden)
        self.narrow = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens [batch, places, width]."""
        normal = self.norm1(x)
        shape = (x.shape[0], x.shape[1], self.heads, _HEAD)
        query = self.query(normal).view(shape).transpose(1, 2)
        key = self.key(normal).view(shape).transpose(1, 2)
        value = self.value(normal).view(shape).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = self.narrow(functional.gelu(self.widen(self.norm2(x))))
        return x + y


class VisionTransformer(nn.Module):
    """Patches, their places, layers, and the mean of the tokens."""

    def __init__(
        self,
        places: int,
        heads: int,
        hidden: int,
        classes: int,
    ) -> None:
        super().__init__()
        width = heads * _HEAD
        self.patches = nn.Conv2d(3, width, _PATCH, _PATCH)
        self.places = nn.Parameter(torch.zeros(1, places, width))
        self.layers = nn.Sequential(*[Layer(heads, hidden) for _ in range(_LAYERS)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [batch, classes] of images [batch, 3, height, width]."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        logits: Tensor = self.head(self.norm(self.layers(tokens)).mean(1))
        return logits


@architecture()
def vit_tiny(
    cut: Cut,
    *,
    input_shape: tuple[int, ...] = (3, 96, 96),
    classes: int = 10,
) -> nn.Module:
    """Build ViT-tiny; a cut takes whole heads."""
    places = (input_shape[1] // _PATCH) * (input_shape[2] // _PATCH)
    heads = cut.width("heads", _HEADS)
    hidden = cut.width("hidden", 4 * _HEADS * _HEAD)
    return VisionTransformer(places, heads, hidden, cut.classes(classes))
