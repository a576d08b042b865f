"""A text classifier on the pre-trained MiniLM encoder, the model of InclusiveFL's GLUE experiments at our size.

Liu, Wu, Wu, Wang, Lyu, Chen, Xie: "No one left behind: Inclusive federated learning over heterogeneous devices", KDD
2022. Depths 2, 4 and 6 stand for the paper's 4, 8 and 12.
"""

from typing import Literal

from fleet_protocol.errors import ConfigError
from models.architecture import architecture
from models.cut import Cut
from models.pretrained import MINILM_EMBED, MINILM_FFN, MINILM_HEADS, MINILM_LAYERS, MINILM_VOCAB
from models.zoo.minilm import DEFAULT_LENGTH, MiniLm, MiniLmSettings, build_minilm
from models.zoo.transformer import TextShape


@architecture(input_dtype="int64", paper="MiniLM (NeurIPS 2020) for the encoder, InclusiveFL (KDD 2022) for the depths")
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
    """Build a text classifier; embedding, heads, feed-forward and head units are cut by width, layers by depth."""
    if pooling not in ("mean", "first"):
        raise ConfigError(f"pooling {pooling!r} is unknown; choose 'mean' or 'first'")
    sizes = TextShape(input_shape[0], vocab, embed, classes)
    settings = MiniLmSettings(sizes, heads, ffn, blocks, dropout, pretrained, pooling, scaler)
    return build_minilm(cut, settings)
