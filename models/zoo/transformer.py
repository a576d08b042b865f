"""The encoder layer that the zoo's Transformers share, cut by width along every axis.

The layer is that of HeteroFL (Diao, Ding, Tarokh: "HeteroFL: Computation and communication
efficient federated learning for heterogeneous clients", ICLR 2021): post-norm, heads that become
thinner but never fewer, Scalers after every linear layer, and layer norms over the local width.
BERT's layer is the same without the Scalers.

Attention uses only matmul and softmax, so that every exporter keeps its gradient.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.cut import Cut
from models.zoo.dropout import Dropout
from models.zoo.layers import Scaler

PAD = 0
"""Token id of padding; it is neither attended to nor pooled."""

MASKED_SCORE = -1e9
"""Added to the score of a position that must not be attended to.

It is finite, so that the softmax of a row of hidden positions exists.
"""

Activation = Literal["gelu", "relu"]

_FFN_DEVIATION = 0.02


@dataclass(frozen=True)
class TextShape:
    """Sizes of a model around its encoder layers."""

    length: int  # of the longest text, in tokens
    vocab: int  # token ids, including padding
    embed: int
    classes: int  # logits


@dataclass(frozen=True)
class LayerShape:
    """Sizes of an encoder layer."""

    heads: int
    head_dim: int
    ffn: int


@dataclass(frozen=True)
class LayerStyle:
    """Settings that all encoder layers of a model share, besides their sizes."""

    rate: float  # width share for the Scalers; 1 for none
    dropout: float = 0.0  # share dropped of what is added to the stream
    inner_dropout: float = 0.0  # share dropped of the feed-forward units
    activation: Activation = "gelu"  # ``gelu`` (exact) or ``relu``
    eps: float = 1e-5  # added to the variance by the layer norms


class Attention(nn.Module):
    """Multi-head self-attention with a projection each for queries, keys and values."""

    def __init__(self, embed: int, heads: int, head_dim: int, rate: float) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = head_dim
        self.query = nn.Linear(embed, heads * head_dim)
        self.key = nn.Linear(embed, heads * head_dim)
        self.value = nn.Linear(embed, heads * head_dim)
        self.output = nn.Linear(heads * head_dim, embed)
        self.scaler = Scaler(rate)

    def forward(self, x: Tensor, penalty: Tensor) -> Tensor:
        """Attend: float32 [batch, length, embed] in and out.

        The penalty is added to the scores and broadcasts to [batch, heads, length, length].
        """
        query = self._heads_of(self.query(x))
        key = self._heads_of(self.key(x))
        value = self._heads_of(self.value(x))
        # The local width of a head, not the global one (specification 1.7).
        scaled = query * (1.0 / math.sqrt(self.head_dim))
        scores = torch.matmul(scaled, key.transpose(-1, -2))
        shares = torch.softmax(scores + penalty, dim=-1)
        mixed = torch.matmul(shares, value)
        mixed = mixed.transpose(1, 2).flatten(-2)
        attended: Tensor = self.scaler(self.output(mixed))
        return attended

    def _heads_of(self, x: Tensor) -> Tensor:
        """Bring [batch, length, heads * head_dim] to [batch, heads, length, head_dim]."""
        heads: Tensor = self.scaler(x).unflatten(-1, (self.heads, self.head_dim))
        return heads.transpose(1, 2)


class EncoderLayer(nn.Module):
    """Attention and a feed-forward network, each added to the stream and then normalised."""

    def __init__(self, embed: int, shape: LayerShape, style: LayerStyle) -> None:
        """Make the layer.

        Raises:
            ConfigError: if a share to drop is outside [0, 1).
        """
        super().__init__()
        self.attention = Attention(embed, shape.heads, shape.head_dim, style.rate)
        self.norm1 = nn.LayerNorm(embed, eps=style.eps)
        self.linear1 = nn.Linear(embed, shape.ffn)
        self.linear2 = nn.Linear(shape.ffn, embed)
        self.norm2 = nn.LayerNorm(embed, eps=style.eps)
        self.scaler = Scaler(style.rate)
        self.activation = style.activation
        self.dropout1 = Dropout(style.dropout)
        self.dropout2 = Dropout(style.inner_dropout)
        self.dropout3 = Dropout(style.dropout)
        nn.init.normal_(self.linear1.weight, std=_FFN_DEVIATION)
        nn.init.normal_(self.linear2.weight, std=_FFN_DEVIATION)

    def forward(self, x: Tensor, penalty: Tensor) -> Tensor:
        """Compute float32 [batch, length, embed] from the same; `penalty` as in `Attention`."""
        attended = self.dropout1(self.attention(x, penalty))
        x = self.norm1(x + attended)
        inner = self.scaler(self.linear1(x))
        active = functional.gelu(inner) if self.activation == "gelu" else inner.relu()
        active = self.dropout2(active)
        added = self.dropout3(self.scaler(self.linear2(active)))
        out: Tensor = self.norm2(x + added)
        return out


def encoder_layers(
    cut: Cut, blocks: int, embed: int, shape: LayerShape, style: LayerStyle
) -> nn.ModuleList:
    """Build a stack of encoder layers.

    Their heads and feed-forward units are axes ``block<n>.attention`` and ``block<n>.ffn``.

    Args:
        cut: asked for the sizes of each layer.
        blocks: number of layers to build, as `Cut.depth` returned it.
        embed: units of the residual stream to build, as `Cut.width` returned them.
        shape: sizes of each layer in the global model.
        style: settings that all layers share.
    """
    layers = nn.ModuleList()
    for number in range(1, blocks + 1):
        head_dim = cut.heads(f"block{number}.attention", shape.heads, shape.head_dim)
        units = cut.width(f"block{number}.ffn", shape.ffn)
        layers.append(EncoderLayer(embed, LayerShape(shape.heads, head_dim, units), style))
    return layers


def padding_penalty(present: Tensor) -> Tensor:
    """Return the penalty that hides padding from `Attention`, float32 [batch, 1, 1, length].

    Args:
        present: 1 for a token and 0 for padding, float32 [batch, length].
    """
    return ((1.0 - present) * MASKED_SCORE)[:, None, None, :]


def future_penalty(length: int, like: Tensor) -> Tensor:
    """Return the penalty that hides later positions from `Attention`, [length, length].

    Args:
        length: number of positions.
        like: a tensor of the dtype and on the device that the penalty should have.
    """
    place = torch.arange(length, device=like.device)
    return (place[None, :] > place[:, None]).to(like.dtype) * MASKED_SCORE
