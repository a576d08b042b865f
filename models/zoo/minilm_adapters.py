"""MiniLM as a text classifier that trains adapters and its head alone: the pre-trained encoder is the same for all.

Wang et al.: "MiniLM", NeurIPS 2020; Hu et al.: "LoRA", ICLR 2022. A tier's width cuts the rank of the adapters, and
nothing else: encoder and head are whole in every tier.
"""

from torch import nn

from models.architecture import architecture
from models.cut import Cut
from models.pretrained import MINILM_EMBED, MINILM_FFN, MINILM_HEADS, MINILM_LAYERS, MINILM_VOCAB
from models.zoo.adapters import Adapters, with_adapters
from models.zoo.minilm import DEFAULT_LENGTH, MiniLmSettings, build_minilm
from models.zoo.transformer import TextShape


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
    """Build a text classifier; the rank of its adapters is cut by width, its layers by depth."""
    sizes = TextShape(input_shape[0], vocab, embed, classes)
    settings = MiniLmSettings(sizes, heads, ffn, blocks, dropout, pretrained)
    model = build_minilm(cut.whole(), settings)
    return with_adapters(model, Adapters(rank, alpha, tuple(targets), tuple(trained)), cut)
