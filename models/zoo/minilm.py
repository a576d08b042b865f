"""The MiniLM encoder with a head for whole texts or for every token, cut by width and by depth.

Wang, Wei, Dong, Bao, Yang, Zhou: "MiniLM", NeurIPS 2020: BERT's architecture (Devlin, Chang, Lee,
Toutanova, NAACL 2019) with 6 layers of width 384 and 12 heads. InclusiveFL (Liu et al., KDD 2022)
trains depths 4, 8 and 12 of a 12-layer encoder; here depths 2, 4 and 6 stand for them, and the head
(a dense layer and the classifier) is the same. Tokens are classified for named entities, as in its
NER: labels are int64 [batch, length], and negative ones (padding, later pieces of a word) do not
count. Adapters are those of Hu et al.: "LoRA", ICLR 2022.

Differences from BERT: the embedding of the one segment is part of the positions, attention weights
are not dropped, and narrow models have HeteroFL's Scalers.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from fleet_protocol.errors import ConfigError
from models.architecture import architecture
from models.cut import Cut
from models.pretrained import (
    MINILM_EMBED,
    MINILM_FFN,
    MINILM_HEADS,
    MINILM_LAYERS,
    MINILM_VOCAB,
    minilm_weights,
)
from models.zoo.adapters import Adapters, with_adapters
from models.zoo.dropout import Dropout
from models.zoo.layers import Scaler
from models.zoo.transformer import (
    PAD,
    LayerShape,
    LayerStyle,
    TextShape,
    encoder_layers,
    padding_penalty,
)

DEFAULT_LENGTH = 64
_EPS = 1e-12  # BERT's, of its layer norms; PyTorch's default is 1e-5
_DEVIATION = 0.02  # BERT's, of all random weights
Pooling = Literal["mean", "first", "none"]
"""How tokens become logits: ``mean`` or ``first`` for a row a text, ``none`` for one a token."""


class MiniLm(nn.Module):
    """Embeddings, encoder layers, and a head of a dense tanh layer and a linear classifier."""

    def __init__(
        self,
        blocks: nn.ModuleList,
        shape: TextShape,
        style: LayerStyle,
        *,
        pooler: int,
        pooling: Pooling,
    ) -> None:
        """Make the network; with a `pooler` of 0 units the head has no dense layer."""
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.embed)
        self.positions = nn.Parameter(torch.empty(shape.length, shape.embed))
        self.norm = nn.LayerNorm(shape.embed, eps=style.eps)
        self.dropout = Dropout(style.dropout)
        self.scaler = Scaler(style.rate)
        self.blocks = blocks
        self.pooler = nn.Linear(shape.embed, pooler) if pooler else None
        self.head_dropout = Dropout(style.dropout)
        self.head = nn.Linear(pooler or shape.embed, shape.classes)
        self.pooling = pooling
        nn.init.normal_(self.positions, std=_DEVIATION)
        for layer in self.modules():
            if isinstance(layer, (nn.Linear, nn.Embedding)):
                nn.init.normal_(layer.weight, std=_DEVIATION)
            if isinstance(layer, nn.Linear):
                nn.init.zeros_(layer.bias)

    def encode(self, tokens: Tensor) -> Tensor:
        """Compute the encoder's output, float32 [batch, length, embed].

        Args:
            tokens: token ids, int64 [batch, length].
        """
        penalty = padding_penalty((tokens != PAD).to(self.positions.dtype))
        x = self.scaler(self.tokens(tokens)) + self.scaler(self.positions[: tokens.shape[1]])
        hidden: Tensor = self.dropout(self.norm(x))
        for block in self.blocks:
            hidden = block(hidden, penalty)
        return hidden

    def pool(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Reduce the encoder's output to float32 [batch, embed], or leave it without pooling."""
        if self.pooling == "none":
            return x
        if self.pooling == "first":
            return x[:, 0]
        present = (tokens != PAD).to(x.dtype)
        # A text of nothing but padding counts as one token.
        mean: Tensor = (x * present[:, :, None]).sum(1) / present.sum(1, keepdim=True).clamp(
            min=1.0
        )
        return mean

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits, float32 [batch, classes], or [batch, length, classes] without pooling.

        Args:
            tokens: token ids, int64 [batch, length], where 0 is padding.
        """
        x = self.pool(self.encode(tokens), tokens)
        if self.pooler is not None:
            x = torch.tanh(self.scaler(self.pooler(x)))
        logits: Tensor = self.head(self.head_dropout(x))
        return logits


@dataclass(frozen=True)
class MiniLmSettings:
    """Settings of a MiniLM encoder with a head.

    Attributes:
        shape: sizes of the global model around its layers.
        ffn: feed-forward units in the global model.
        pretrained: whether to load the weights of the MiniLM package. Narrow models keep random
            weights, since theirs are slices of the global model's.
        pooling: as in `MiniLm`; a head without pooling has no dense layer.
        scaler: whether narrow models scale up.

    Raises:
        ConfigError: if the sizes do not fit together, or are not those of the pre-trained encoder.
    """

    shape: TextShape
    heads: int
    ffn: int
    blocks: int
    dropout: float
    pretrained: bool
    pooling: Pooling = "mean"
    scaler: bool = False

    def __post_init__(self) -> None:
        if self.shape.embed % self.heads:
            raise ConfigError(f"embed {self.shape.embed} is not a multiple of heads {self.heads}")
        if self.pretrained:
            self._check_pretrained()

    def _check_pretrained(self) -> None:
        sizes = (self.shape.vocab, self.shape.embed, self.heads, self.ffn)
        if sizes != (MINILM_VOCAB, MINILM_EMBED, MINILM_HEADS, MINILM_FFN):
            raise ConfigError(
                f"the pre-trained MiniLM has vocab {MINILM_VOCAB}, embed {MINILM_EMBED}, heads "
                f"{MINILM_HEADS} and ffn {MINILM_FFN}; keep these settings or set pretrained = "
                "false"
            )
        if self.blocks > MINILM_LAYERS:
            raise ConfigError(
                f"the pre-trained MiniLM has {MINILM_LAYERS} layers, not {self.blocks}; choose "
                "fewer blocks"
            )


def build_minilm(cut: Cut, settings: MiniLmSettings) -> MiniLm:
    """Build a MiniLM encoder with a head, and load the pre-trained weights into the whole model.

    Raises:
        ConfigError: if the package of the pre-trained weights is missing.
    """
    whole = settings.shape
    depth = cut.depth(settings.blocks)
    width = cut.width("embed", whole.embed)
    style = LayerStyle(cut.rate if settings.scaler else 1.0, settings.dropout, eps=_EPS)
    layer = LayerShape(settings.heads, whole.embed // settings.heads, settings.ffn)
    blocks = encoder_layers(cut, depth, width, layer, style)
    pooler = 0 if settings.pooling == "none" else cut.width("pooler", whole.embed)
    shape = replace(whole, embed=width, classes=cut.classes(whole.classes))
    model = MiniLm(blocks, shape, style, pooler=pooler, pooling=settings.pooling)
    # Layouts are inferred on the meta device, where there is nothing to load into.
    if settings.pretrained and cut.rate == 1.0 and model.positions.device.type != "meta":
        weights = minilm_weights(depth, whole.length)
        stored = {name: torch.from_numpy(value) for name, value in weights.items()}
        model.load_state_dict({**model.state_dict(), **stored})
    return model


@architecture(
    input_dtype="int64",
    paper="MiniLM (NeurIPS 2020) for the encoder, InclusiveFL (KDD 2022) for the depths",
)
def minilm_encoder(
    cut: Cut,
    *,
    input_shape: tuple[int] = (DEFAULT_LENGTH,),
    classes: int = 2,
    vocab: int = MINILM_VOCAB,
    embed: int = MINILM_EMBED,
    heads: int = MINILM_HEADS,
    ffn: int = MINILM_FFN,
    blocks: int = MINILM_LAYERS,
    dropout: float = 0.1,
    pooling: Literal["mean", "first"] = "mean",
    pretrained: bool = True,
    scaler: bool = True,
) -> MiniLm:
    """Build a text classifier.

    Embedding, heads, feed-forward and head units are cut by width, layers by depth.
    """
    sizes = TextShape(input_shape[0], vocab, embed, classes)
    return build_minilm(
        cut,
        MiniLmSettings(sizes, heads, ffn, blocks, dropout, pretrained, pooling, scaler),
    )


@architecture(input_dtype="int64", paper="MiniLM (NeurIPS 2020) with LoRA (ICLR 2022)")
def minilm_adapters(
    cut: Cut,
    *,
    input_shape: tuple[int] = (DEFAULT_LENGTH,),
    classes: int = 2,
    rank: int = 8,
    alpha: float = 16.0,
    targets: tuple[str, ...] = ("blocks.*.query", "blocks.*.value"),
    trained: tuple[str, ...] = ("pooler.*", "head.*"),
    vocab: int = MINILM_VOCAB,
    embed: int = MINILM_EMBED,
    heads: int = MINILM_HEADS,
    ffn: int = MINILM_FFN,
    blocks: int = MINILM_LAYERS,
    dropout: float = 0.1,
    pretrained: bool = True,
) -> nn.Module:
    """Build a text classifier that trains adapters and its head beside a frozen encoder.

    The rank of its adapters is cut by width, its layers by depth.
    """
    sizes = TextShape(input_shape[0], vocab, embed, classes)
    settings = MiniLmSettings(sizes, heads, ffn, blocks, dropout, pretrained)
    # The encoder is whole in every tier, so its frozen weights are one file for all.
    model = build_minilm(cut.whole(), settings)
    return with_adapters(model, Adapters(rank, alpha, tuple(targets), tuple(trained)), cut)


@architecture(
    input_dtype="int64",
    paper="MiniLM (NeurIPS 2020) for the encoder, InclusiveFL (KDD 2022) for the task",
)
def token_classifier(
    cut: Cut,
    *,
    input_shape: tuple[int] = (DEFAULT_LENGTH,),
    classes: int = 3,
    vocab: int = MINILM_VOCAB,
    embed: int = MINILM_EMBED,
    heads: int = MINILM_HEADS,
    ffn: int = MINILM_FFN,
    blocks: int = MINILM_LAYERS,
    dropout: float = 0.1,
    pretrained: bool = True,
    scaler: bool = True,
) -> MiniLm:
    """Build a token classifier, cut by width and by depth.

    Its 3 classes are outside, begin and inside of one entity type.
    """
    sizes = TextShape(input_shape[0], vocab, embed, classes)
    return build_minilm(
        cut,
        MiniLmSettings(sizes, heads, ffn, blocks, dropout, pretrained, "none", scaler),
    )
