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


class TextEncoder(nn.Module):
    """Token and position embedding, encoder layers, mean over the tokens, a linear classifier."""

    def __init__(self, shape: TextShape, layers: Sequence[LayerShape], rate: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.embed)
        self.positions = nn.Parameter(torch.empty(shape.length, shape.embed))
        self.scaler = Scaler(rate)
        self.norm = nn.LayerNorm(shape.embed)
        self.blocks = nn.ModuleList(
            EncoderLayer(shape.embed, layer, LayerStyle(rate)) for layer in layers
        )
        self.head = nn.Linear(shape.embed, shape.classes)
        nn.init.normal_(self.positions)
        zero_linear_biases(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits, float32 [batch, classes], of token ids, int64 [batch, length]."""
        present = (tokens != PAD).to(self.positions.dtype)
        penalty = padding_penalty(present)
        x = self.norm(self.scaler(self.tokens(tokens)) + self.scaler(self.positions))
        for block in self.blocks:
            x = block(x, penalty)
        # A text of nothing but padding counts as one token, and gets the bias of the head.
        count = present.sum(1, keepdim=True).clamp(min=1.0)
        logits: Tensor = self.head((x * present[:, :, None]).sum(1) / count)
        return logits


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
    if embed % heads:
        raise ConfigError(f"embed {embed} is not a multiple of heads {heads}")
    depth = cut.depth(blocks)
    shape = TextShape(input_shape[0], vocab, cut.width("embed", embed), cut.classes(classes))
    # The axes of all heads are named before those of the feed-forward units; a layout keeps the
    # order.
    numbers = range(1, depth + 1)
    head_dims = [cut.heads(f"block{n}.attention", heads, embed // heads) for n in numbers]
    layers: list[LayerShape] = []
    for number, head_dim in enumerate(head_dims, 1):
        layers.append(LayerShape(heads, head_dim, cut.width(f"block{number}.ffn", ffn)))
    return TextEncoder(shape, layers, cut.rate if scaler else 1.0)
