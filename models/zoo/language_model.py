"""The Transformer that HeteroFL and FedRolex train to predict tokens at every position.

Diao, Ding, Tarokh: "HeteroFL", ICLR 2021; Alam, Liu, Yan, Zhang: "FedRolex", NeurIPS 2022. Learned
positions, post-norm encoder layers and a two-layer decoder, all cut by width; the vocabulary is the
label axis, so the rows of the token embedding and of the projection fall under the label rule.

HeteroFL's model masks tokens of WikiText-2, with sizes as in the authors' code (specification 1.7).
In training it masks each token with a probability of 0.15, and the loss is over all positions,
masked or not. In evaluation the model masks nothing: the test text already has masks, so that every
device and round is evaluated on the same text.

FedRolex's model predicts the next word. The sizes are those of the released code, which
specification 2.5 follows; the paper has heads of 12 dimensions and ReLU instead (`head_dim=12,
activation="relu"`). The token table has a row for each word and none for a mask symbol, which this
task does not use.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from fleet_protocol.errors import ConfigError
from models.architecture import architecture
from models.cut import Cut
from models.zoo.dropout import Dropout, TokenMask
from models.zoo.layers import Scaler, zero_linear_biases
from models.zoo.transformer import (
    Activation,
    LayerShape,
    LayerStyle,
    TextShape,
    encoder_layers,
    future_penalty,
)

MaskRow = Literal["as_released", "shared"]


class MaskableEmbedding(nn.Module):
    """A token embedding whose mask symbol has a separate row outside the token table."""

    def __init__(self, tokens: int, embed: int, symbol: int) -> None:
        """Make the layer with a row for each token, and one for the id of the mask symbol."""
        super().__init__()
        self.symbol = symbol
        self.weight = nn.Parameter(torch.empty(tokens, embed))
        self.mask = nn.Parameter(torch.empty(1, embed))
        nn.init.normal_(self.weight)
        nn.init.normal_(self.mask)

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up float32 [batch, length, embed] of token ids, int64 [batch, length]."""
        masked = tokens == self.symbol
        # The mask symbol has no row in this table, so its places read any row first.
        rows = nn.functional.embedding(torch.where(masked, 0, tokens), self.weight)
        return torch.where(masked[..., None], self.mask[0], rows)


class LanguageModel(nn.Module):
    """Embeddings, encoder layers and a decoder with logits for every position."""

    def __init__(
        self,
        tokens: nn.Module,
        blocks: nn.ModuleList,
        shape: TextShape,
        style: LayerStyle,
        mask: TokenMask | None = None,
    ) -> None:
        """Make the network. All encoder layers start as copies of the first, as released.

        With a `mask`, which masks tokens in training, the model predicts them at their position.
        Without it, the model predicts the next token, and a position attends only to itself and
        earlier ones.
        """
        super().__init__()
        self.mask = mask
        self.tokens = tokens
        self.positions = nn.Parameter(torch.empty(shape.length, shape.embed))
        self.scaler = Scaler(style.rate)
        self.norm = nn.LayerNorm(shape.embed)
        self.dropout = Dropout(style.dropout)
        self.blocks = blocks
        self.decoder = nn.Linear(shape.embed, shape.embed)
        self.decoder_norm = nn.LayerNorm(shape.embed)
        self.head = nn.Linear(shape.embed, shape.classes)
        nn.init.normal_(self.positions)
        zero_linear_biases(self)
        if self.positions.device.type != "meta":
            # Not during the inference of a layout, when one layer may be larger than the others.
            for block in list(blocks)[1:]:
                block.load_state_dict(blocks[0].state_dict())

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits, float32 [batch, length, vocab], of token ids, int64 [batch, length]."""
        if self.mask is not None:
            tokens = self.mask(tokens)
        length = tokens.shape[1]
        x = self.scaler(self.tokens(tokens)) + self.scaler(self.positions[:length])
        x = self.dropout(self.norm(x))
        penalty = self._penalty(length, x)
        for block in self.blocks:
            x = block(x, penalty)
        x = self.decoder_norm(nn.functional.gelu(self.scaler(self.decoder(x))))
        logits: Tensor = self.head(x)
        return logits

    def _penalty(self, length: int, x: Tensor) -> Tensor:
        """Return the penalty that hides later positions: float32 [1, 1, length, length].

        With masks, no position is hidden: [1, 1, 1, 1] of zeros.
        """
        if self.mask is not None:
            return torch.zeros(1, 1, 1, 1, dtype=x.dtype, device=x.device)
        return future_penalty(length, x)[None, None]


@architecture(input_dtype="int64", paper="ICLR 2021, arXiv:2010.01264 (WikiText-2)")
def transformer_mlm(
    cut: Cut,
    *,
    input_shape: tuple[int] = (64,),
    classes: int = 33279,
    embed: int = 256,
    heads: int = 8,
    ffn: int = 512,
    blocks: int = 4,
    dropout: float = 0.2,
    mask_rate: float = 0.15,
    mask_row: MaskRow = "as_released",
    scaler: bool = True,
) -> LanguageModel:
    """Build a masked language model.

    Its labels are the tokens, and token `classes` is the mask symbol.

    The row of the mask symbol belongs to no label. `as_released` keeps it in the table of the
    tokens, under the label rule, so no device ever changes it on the server; `shared` gives it a
    separate parameter that is merged like any other. Both have the same number of parameters.
    """
    if embed % heads:
        raise ConfigError(f"embed {embed} is not a multiple of heads {heads}")
    depth = cut.depth(blocks)
    width = cut.width("embed", embed)
    style = LayerStyle(cut.rate if scaler else 1.0, dropout, dropout)
    vocab = cut.classes(classes)
    tokens: nn.Module
    if mask_row == "as_released":
        # One more row, for the mask symbol.
        tokens = nn.Embedding(cut.labels("tokens", classes + 1), width)
    else:
        tokens = MaskableEmbedding(vocab, width, classes)
    return LanguageModel(
        tokens,
        encoder_layers(cut, depth, width, LayerShape(heads, embed // heads, ffn), style),
        TextShape(input_shape[0], classes + 1, width, vocab),
        style,
        TokenMask(mask_rate, classes),
    )


@architecture(input_dtype="int64", paper="NeurIPS 2022, arXiv:2212.01548 (Stack Overflow)")
def next_word(
    cut: Cut,
    *,
    input_shape: tuple[int] = (20,),
    classes: int = 10000,
    embed: int = 128,
    heads: int = 8,
    head_dim: int = 16,
    ffn: int = 2048,
    blocks: int = 3,
    dropout: float = 0.1,
    activation: Activation = "gelu",
    scaler: bool = True,
) -> LanguageModel:
    """Build a causal language model; its labels are the words, one at each position."""
    if heads < 1 or head_dim < 1:
        raise ConfigError(
            f"{heads} heads of {head_dim} dimensions cannot be built; use at least 1 of each"
        )
    depth = cut.depth(blocks)
    width = cut.width("embed", embed)
    style = LayerStyle(cut.rate if scaler else 1.0, dropout, dropout, activation)
    vocab = cut.classes(classes)
    return LanguageModel(
        nn.Embedding(vocab, width),
        encoder_layers(cut, depth, width, LayerShape(heads, head_dim, ffn), style),
        TextShape(input_shape[0], vocab, width, vocab),
        style,
    )
