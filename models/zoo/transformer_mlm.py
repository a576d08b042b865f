"""HeteroFL's masked language model for WikiText-2.

Diao, Ding, Tarokh: "HeteroFL: Computation and communication efficient federated learning for heterogeneous
clients", ICLR 2021, sizes as in the authors' code (specification 1.7). In training each token is hidden with a
probability of 0.15, and the loss is over all positions, hidden or not. In evaluation the model hides nothing: the test
text has its masks already, so that every device and round is judged on the same one.
"""

from typing import Literal

from torch import nn

from fleet_protocol.errors import ConfigError
from models.architecture import architecture
from models.cut import Cut
from models.zoo.dropout import TokenMask
from models.zoo.language_model import LanguageModel, MaskableEmbedding
from models.zoo.transformer import LayerShape, LayerStyle, TextShape, encoder_layers

MaskRow = Literal["as_released", "shared"]


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
    """Build a masked language model; its labels are the tokens, and token `classes` is the mask symbol.

    The row of the mask symbol belongs to no label. `as_released` keeps it in the table of the tokens, under the label
    rule, so no device ever changes it on the server; `shared` gives it a parameter of its own that is merged like
    any other. Both have the same number of parameters.
    """
    if embed % heads:
        raise ConfigError(f"embed {embed} is not a multiple of heads {heads}")
    if mask_row not in ("as_released", "shared"):
        raise ConfigError(f"mask_row {mask_row!r} is unknown; choose 'as_released' or 'shared'")
    depth, width = cut.depth(blocks), cut.width("embed", embed)
    style = LayerStyle(cut.rate if scaler else 1.0, dropout, dropout)
    vocab = cut.classes(classes)
    return LanguageModel(
        nn.Embedding(cut.labels("tokens", classes + 1), width)
        if mask_row == "as_released"
        else MaskableEmbedding(vocab, width, classes),
        encoder_layers(cut, depth, width, LayerShape(heads, embed // heads, ffn), style),
        TextShape(input_shape[0], classes + 1, width, vocab),
        style,
        TokenMask(mask_rate, classes),
    )
