"""The Transformer that HeteroFL and FedRolex train to predict tokens at every position.

Diao, Ding, Tarokh: "HeteroFL", ICLR 2021; Alam, Liu, Yan, Zhang: "FedRolex", NeurIPS 2022. Learned positions,
post-norm encoder layers and a two-layer decoder, all cut by width; the vocabulary is the label axis, so the rows of
the token embedding and of the projection fall under the label rule.
"""

import torch
from torch import Tensor, nn

from models.zoo.dropout import Dropout, TokenMask
from models.zoo.layers import Scaler, zero_linear_biases
from models.zoo.transformer import LayerStyle, TextShape, future_penalty


class MaskableEmbedding(nn.Module):
    """A token embedding whose mask symbol has a row of its own, outside the table of the tokens."""

    def __init__(self, tokens: int, embed: int, symbol: int) -> None:
        """Make the layer with so many rows, and one for the mask symbol, which is a token id."""
        super().__init__()
        self.symbol = symbol
        self.weight = nn.Parameter(torch.empty(tokens, embed))
        self.mask = nn.Parameter(torch.empty(1, embed))
        nn.init.normal_(self.weight)
        nn.init.normal_(self.mask)

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up float32 [batch, length, embed] of token ids, int64 [batch, length]."""
        masked = tokens == self.symbol
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

        Without a `mask`, which hides tokens in training to be told at their place, the model tells the next token, and
        a position sees only itself and those before it.
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
            # Not while a layout is inferred, when one layer may be larger than the others.
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
        """Forbid the later positions: float32 [1, 1, length, length]; nothing where tokens are hidden, [1, 1, 1, 1]."""
        if self.mask is not None:
            return torch.zeros(1, 1, 1, 1, dtype=x.dtype, device=x.device)
        return future_penalty(length, x)[None, None]
