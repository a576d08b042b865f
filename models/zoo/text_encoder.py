"""A Transformer encoder for classifying texts, cut by width (every axis) and by depth (whole layers).

The layer is that of HeteroFL (Diao et al., ICLR 2021): post-norm, no dropout here, heads that become thinner but
never fewer, and layer norms over the local width. Depth prefixes are those of InclusiveFL (Liu, Wu, Wu, Wang, Lyu,
Chen, Xie: "No one left behind: Inclusive federated learning over heterogeneous devices", KDD 2022).

Attention is written with matmul and softmax alone, so that every exporter keeps its gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from fleet_protocol.errors import ConfigError
from models.cut import Cut
from models.registry import architecture
from models.zoo.layers import Scaler, zero_linear_biases

__all__ = ["PAD", "Attention", "EncoderLayer", "TextEncoder", "text_encoder"]

PAD = 0
"""Token id of padding; it is neither attended to nor pooled."""

_MASKED_SCORE = -1e9
_FFN_DEVIATION = 0.02


class Attention(nn.Module):
    """Multi-head self-attention with a projection each for queries, keys and values."""

    def __init__(self, embed: int, heads: int, head_dim: int, rate: float) -> None:
        """Make the layer.

        Args:
            embed: width of the residual stream.
            heads: number of heads.
            head_dim: dimensions of each head.
            rate: width share for the Scalers.
        """
        super().__init__()
        self.heads = heads
        self.head_dim = head_dim
        self.query = nn.Linear(embed, heads * head_dim)
        self.key = nn.Linear(embed, heads * head_dim)
        self.value = nn.Linear(embed, heads * head_dim)
        self.output = nn.Linear(heads * head_dim, embed)
        self.scaler = Scaler(rate)

    def forward(self, x: Tensor, penalty: Tensor) -> Tensor:
        """Attend.

        Args:
            x: float32 [batch, length, embed].
            penalty: added to the scores, float32 [batch, 1, 1, length].

        Returns:
            float32 [batch, length, embed].
        """
        query, key, value = (
            self.scaler(layer(x)).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        # The local width of a head, not the global one (METHODS 1.7).
        scores = torch.matmul(query * (1.0 / math.sqrt(self.head_dim)), key.transpose(-1, -2))
        mixed = torch.matmul(torch.softmax(scores + penalty, dim=-1), value)
        joined: Tensor = self.scaler(self.output(mixed.transpose(1, 2).flatten(-2)))
        return joined


class EncoderLayer(nn.Module):
    """Attention and a feed-forward network, each added to the stream and then normalised."""

    def __init__(self, embed: int, heads: int, head_dim: int, ffn: int, rate: float) -> None:
        """Make the layer.

        Args:
            embed: width of the residual stream.
            heads: number of heads.
            head_dim: dimensions of each head.
            ffn: units of the feed-forward network.
            rate: width share for the Scalers.
        """
        super().__init__()
        self.attention = Attention(embed, heads, head_dim, rate)
        self.norm1 = nn.LayerNorm(embed)
        self.linear1 = nn.Linear(embed, ffn)
        self.linear2 = nn.Linear(ffn, embed)
        self.norm2 = nn.LayerNorm(embed)
        self.scaler = Scaler(rate)
        nn.init.normal_(self.linear1.weight, std=_FFN_DEVIATION)
        nn.init.normal_(self.linear2.weight, std=_FFN_DEVIATION)

    def forward(self, x: Tensor, penalty: Tensor) -> Tensor:
        """Compute float32 [batch, length, embed] from the same; `penalty` as in `Attention`."""
        x = self.norm1(x + self.attention(x, penalty))
        inner = functional.gelu(self.scaler(self.linear1(x)))
        out: Tensor = self.norm2(x + self.scaler(self.linear2(inner)))
        return out


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
        penalty = ((1.0 - present) * _MASKED_SCORE)[:, None, None, :]
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
