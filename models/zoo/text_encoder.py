"""A Transformer encoder for classifying texts, cut by width and by depth.

The layer is that of HeteroFL (Diao et al., ICLR 2021), without dropout here. Depth prefixes are
those of InclusiveFL (Liu, Wu, Wu, Wang, Lyu, Chen, Xie: "No one left behind: Inclusive federated
learning over heterogeneous devices", KDD 2022).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fleet_protocol.errors import ConfigError
from models.architecture import architecture
from models.cut import Cut
from models.zoo.layers import Scaler, zero_linear_biases
from models.zoo.transformer import (
    PAD,
    EncoderLayer,
    LayerShape,
    LayerStyle,
    TextShape,
    padding_penalty,
)


class TextTrunk(nn.Module):
    """Token and position embedding, and encoder layers.

    A class with classifiers calls `draw_positions` after it has made them.

    Args:
        shape: sizes of the texts and of the embedding.
        layers: sizes of each encoder layer, from the bottom.
        rate: the share of the width, by which the Scaler divides.
    """

    def __init__(self, shape: TextShape, layers: Sequence[LayerShape], rate: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.embed)
        self.positions = nn.Parameter(torch.empty(shape.length, shape.embed))
        self.scaler = Scaler(rate)
        self.norm = nn.LayerNorm(shape.embed)
        self.blocks = nn.ModuleList(
            EncoderLayer(shape.embed, layer, LayerStyle(rate)) for layer in layers
        )

    def draw_positions(self) -> None:
        """Draw the embedding of the positions, and set the biases of linear layers to zero."""
        nn.init.normal_(self.positions)
        zero_linear_biases(self)

    def mask_of(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return which tokens count, float32 [batch, length], and what attention adds for them."""
        present = (tokens != PAD).to(self.positions.dtype)
        return present, padding_penalty(present)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return the embedding of token ids, float32 [batch, length, embed]."""
        embedded: Tensor = self.norm(self.scaler(self.tokens(tokens)) + self.scaler(self.positions))
        return embedded

    def mean_of_tokens(self, x: Tensor, present: Tensor) -> Tensor:
        """Return the mean over the tokens that count, float32 [batch, embed]."""
        # A text of nothing but padding counts as one token, and gets the bias of the head.
        count = present.sum(1, keepdim=True).clamp(min=1.0)
        mean: Tensor = (x * present[:, :, None]).sum(1) / count
        return mean


class TextEncoder(TextTrunk):
    """The trunk, a mean over the tokens, and a linear classifier."""

    def __init__(self, shape: TextShape, layers: Sequence[LayerShape], rate: float) -> None:
        super().__init__(shape, layers, rate)
        self.head = nn.Linear(shape.embed, shape.classes)
        self.draw_positions()

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits, float32 [batch, classes], of token ids, int64 [batch, length]."""
        present, penalty = self.mask_of(tokens)
        x = self.embedded(tokens)
        for block in self.blocks:
            x = block(x, penalty)
        logits: Tensor = self.head(self.mean_of_tokens(x, present))
        return logits


def shapes_of(cut: Cut, depth: int, embed: int, heads: int, ffn: int) -> list[LayerShape]:
    """Return the sizes of the layers of a sub-model.

    Args:
        cut: the width of the sub-model.
        depth: its layers.
        embed: the size of the whole embedding.
        heads: attention heads of each layer.
        ffn: feed-forward units of each layer of the whole model.

    Raises:
        ConfigError: the embedding cannot be divided among the heads.
    """
    if embed % heads:
        raise ConfigError(f"embed {embed} is not a multiple of heads {heads}")
    # The axes of all heads are named before those of the feed-forward units; a layout keeps the
    # order.
    numbers = range(1, depth + 1)
    head_dims = [cut.heads(f"block{n}.attention", heads, embed // heads) for n in numbers]
    layers: list[LayerShape] = []
    for number, head_dim in enumerate(head_dims, 1):
        layers.append(LayerShape(heads, head_dim, cut.width(f"block{number}.ffn", ffn)))
    return layers


@architecture(
    input_dtype="int64",
    paper="HeteroFL (ICLR 2021) for the width, InclusiveFL (KDD 2022) for the depth",
)
def text_encoder(
    cut: Cut,
    *,
    input_shape: tuple[int] = (32,),
    classes: int = 4,
    vocab: int = 2000,
    embed: int = 64,
    heads: int = 4,
    ffn: int = 128,
    blocks: int = 4,
    scaler: bool = True,
) -> TextEncoder:
    """Build a text classifier.

    Embedding, heads and feed-forward units are cut by width, layers by depth.
    """
    depth = cut.depth(blocks)
    shape = TextShape(input_shape[0], vocab, cut.width("embed", embed), cut.classes(classes))
    layers = shapes_of(cut, depth, embed, heads, ffn)
    return TextEncoder(shape, layers, cut.rate if scaler else 1.0)
