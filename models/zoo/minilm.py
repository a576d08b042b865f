"""The MiniLM encoder with a head for whole texts or for every token, cut by width and by depth.

Wang, Wei, Dong, Bao, Yang, Zhou: "MiniLM", NeurIPS 2020: BERT's architecture (Devlin, Chang, Lee, Toutanova, NAACL
2019) with 6 layers of width 384 and 12 heads. InclusiveFL (Liu et al., KDD 2022) trains depths 4, 8 and 12 of a
12-layer encoder; here depths 2, 4 and 6 stand for them, and the head (a dense layer and the classifier) is its too.

Differences from BERT: the embedding of the one segment is part of the positions, attention weights are not dropped,
and narrow models have HeteroFL's Scalers.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from fleet_protocol.errors import ConfigError
from models.cut import Cut
from models.pretrained import MINILM_EMBED, MINILM_FFN, MINILM_HEADS, MINILM_LAYERS, MINILM_VOCAB, minilm_weights
from models.zoo.dropout import Dropout
from models.zoo.layers import Scaler
from models.zoo.transformer import PAD, encoder_layers, padding_penalty

__all__ = ["DEFAULT_LENGTH", "MiniLm", "Pooling", "build_minilm"]

DEFAULT_LENGTH = 64
_EPS = 1e-12
_DEVIATION = 0.02
Pooling = Literal["mean", "first", "none"]
"""How the tokens become logits: ``mean`` or ``first`` for one row per text, ``none`` for one per token."""


class MiniLm(nn.Module):
    """Embeddings, encoder layers, and a head of a dense tanh layer and a linear classifier."""

    def __init__(
        self,
        blocks: nn.ModuleList,
        *,
        vocab: int,
        length: int,
        embed: int,
        pooler: int,
        classes: int,
        rate: float,
        dropout: float,
        pooling: Pooling,
    ) -> None:
        """Make the network.

        Args:
            blocks: the encoder layers.
            vocab: token ids, padding included.
            length: longest text, in tokens.
            embed: width of the residual stream.
            pooler: units of the head's dense layer; 0 for a head without one.
            classes: logits.
            rate: width share for the Scalers; 1 for none.
            dropout: share dropped of the embedded text and before the classifier.
            pooling: ``mean`` over the tokens, the ``first`` token, or ``none``.
        """
        super().__init__()
        self.tokens = nn.Embedding(vocab, embed)
        self.positions = nn.Parameter(torch.empty(length, embed))
        self.norm = nn.LayerNorm(embed, eps=_EPS)
        self.dropout = Dropout(dropout)
        self.scaler = Scaler(rate)
        self.blocks = blocks
        self.pooler = nn.Linear(embed, pooler) if pooler else None
        self.head_dropout = Dropout(dropout)
        self.head = nn.Linear(pooler or embed, classes)
        self.pooling = pooling
        nn.init.normal_(self.positions, std=_DEVIATION)
        for layer in self.modules():
            if isinstance(layer, (nn.Linear, nn.Embedding)):
                nn.init.normal_(layer.weight, std=_DEVIATION)
            if isinstance(layer, nn.Linear):
                nn.init.zeros_(layer.bias)

    def encode(self, tokens: Tensor) -> Tensor:
        """Compute the encoder's output, float32 [batch, length, embed], of token ids, int64 [batch, length]."""
        present = (tokens != PAD).to(self.positions.dtype)
        penalty = padding_penalty(present)
        x = self.scaler(self.tokens(tokens)) + self.scaler(self.positions[: tokens.shape[1]])
        hidden: Tensor = self.dropout(self.norm(x))
        for block in self.blocks:
            hidden = block(hidden, penalty)
        return hidden

    def pool(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Reduce the encoder's output to a row per text, float32 [batch, embed], or leave it as it is."""
        if self.pooling == "none":
            return x
        if self.pooling == "first":
            return x[:, 0]
        present = (tokens != PAD).to(x.dtype)
        # A text of nothing but padding counts as one token.
        mean: Tensor = (x * present[:, :, None]).sum(1) / present.sum(1, keepdim=True).clamp(min=1.0)
        return mean

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits of token ids, int64 [batch, length].

        Args:
            tokens: token ids; 0 is padding.

        Returns:
            float32 [batch, classes], or [batch, length, classes] without pooling.
        """
        x = self.pool(self.encode(tokens), tokens)
        if self.pooler is not None:
            x = torch.tanh(self.scaler(self.pooler(x)))
        logits: Tensor = self.head(self.head_dropout(x))
        return logits


def build_minilm(
    cut: Cut,
    *,
    length: int,
    classes: int,
    vocab: int,
    embed: int,
    heads: int,
    ffn: int,
    blocks: int,
    dropout: float,
    pooling: Pooling,
    pretrained: bool,
    scaler: bool,
) -> MiniLm:
    """Build a MiniLM encoder with a head, and load the pre-trained weights into the whole model.

    Args:
        cut: names the axes.
        length: longest text, in tokens.
        classes: logits.
        vocab: token ids.
        embed: width of the residual stream in the global model.
        heads: heads of each layer.
        ffn: feed-forward units in the global model.
        blocks: encoder layers of the global model.
        dropout: share dropped.
        pooling: as in `MiniLm`; a head without pooling has no dense layer.
        pretrained: whether to load the weights of the MiniLM package. Narrow models are left at random, since their
            weights are slices of the global model's.
        scaler: whether narrow models scale up.

    Returns:
        The model.

    Raises:
        ConfigError: if the sizes are not those of the pre-trained encoder, or its package is missing.
    """
    if embed % heads:
        raise ConfigError(f"embed {embed} is not a multiple of heads {heads}")
    if pretrained and (vocab, embed, heads, ffn) != (MINILM_VOCAB, MINILM_EMBED, MINILM_HEADS, MINILM_FFN):
        raise ConfigError(
            f"the pre-trained MiniLM has vocab {MINILM_VOCAB}, embed {MINILM_EMBED}, heads {MINILM_HEADS} and ffn"
            f" {MINILM_FFN}; keep these settings or set pretrained = false"
        )
    if pretrained and blocks > MINILM_LAYERS:
        raise ConfigError(f"the pre-trained MiniLM has {MINILM_LAYERS} layers, not {blocks}; choose fewer blocks")
    depth, width = cut.depth(blocks), cut.width("embed", embed)
    rate = cut.rate if scaler else 1.0
    model = MiniLm(
        encoder_layers(cut, depth, width, heads, embed // heads, ffn, rate, dropout=dropout, eps=_EPS),
        vocab=vocab,
        length=length,
        embed=width,
        pooler=0 if pooling == "none" else cut.width("pooler", embed),
        classes=cut.classes(classes),
        rate=rate,
        dropout=dropout,
        pooling=pooling,
    )
    # Layouts are inferred on the meta device, where there is nothing to load into.
    if pretrained and cut.rate == 1.0 and model.positions.device.type != "meta":
        stored = {name: torch.from_numpy(value) for name, value in minilm_weights(depth, length).items()}
        model.load_state_dict({**model.state_dict(), **stored})
    return model
