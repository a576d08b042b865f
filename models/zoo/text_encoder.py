"""A Transformer encoder for classifying texts, cut by width (every axis) and by depth (whole layers).

The layer is that of HeteroFL (Diao et al., ICLR 2021), without dropout here. Depth prefixes are those of InclusiveFL
(Liu, Wu, Wu, Wang, Lyu, Chen, Xie: "No one left behind: Inclusive federated learning over heterogeneous devices",
KDD 2022).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fleet_protocol.errors import ConfigError
from models.cut import Cut
from models.registry import architecture
from models.zoo.layers import Scaler, zero_linear_biases
from models.zoo.transformer import PAD, EncoderLayer, padding_penalty

__all__ = ["TextEncoder", "text_encoder"]


class TextEncoder(nn.Module):
    """Token and position embedding, encoder layers, mean over the tokens, a linear classifier."""

    def __init__(
        self,
        vocab: int,
        length: int,
        classes: int,
        *,
        blocks: int,
        embed: int,
        heads: int,
        head_dims: tuple[int, ...],
        ffns: tuple[int, ...],
        rate: float,
    ) -> None:
        """Make the network.

        Args:
            vocab: token ids, padding included.
            length: tokens of one sample.
            classes: logits.
            blocks: encoder layers to build.
            embed: width of the residual stream.
            heads: heads of each layer.
            head_dims: dimensions of each head, by layer.
            ffns: feed-forward units, by layer.
            rate: width share for the Scalers.
        """
        super().__init__()
        self.tokens = nn.Embedding(vocab, embed)
        self.positions = nn.Parameter(torch.empty(length, embed))
        self.scaler = Scaler(rate)
        self.norm = nn.LayerNorm(embed)
        self.blocks = nn.ModuleList(
            EncoderLayer(embed, heads, head_dims[number], ffns[number], rate) for number in range(blocks)
        )
        self.head = nn.Linear(embed, classes)
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
        pooled = (x * present[:, :, None]).sum(1) / count
        logits: Tensor = self.head(pooled)
        return logits


@architecture(input_dtype="int64", paper="HeteroFL (ICLR 2021) for the width, InclusiveFL (KDD 2022) for the depth")
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
    """Build a text classifier; embedding, heads and feed-forward units are cut by width, layers by depth."""
    if embed % heads:
        raise ConfigError(f"embed {embed} is not a multiple of heads {heads}")
    kept_blocks = cut.depth(blocks)
    kept_embed = cut.width("embed", embed)
    return TextEncoder(
        vocab,
        input_shape[0],
        cut.classes(classes),
        blocks=kept_blocks,
        embed=kept_embed,
        heads=heads,
        head_dims=tuple(
            cut.heads(f"block{number}.attention", heads, embed // heads) for number in range(1, kept_blocks + 1)
        ),
        ffns=tuple(cut.width(f"block{number}.ffn", ffn) for number in range(1, kept_blocks + 1)),
        rate=cut.rate if scaler else 1.0,
    )
