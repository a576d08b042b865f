"""A classifier of every token on the pre-trained MiniLM encoder, for named entities as in InclusiveFL's NER.

Liu, Wu, Wu, Wang, Lyu, Chen, Xie: "No one left behind: Inclusive federated learning over heterogeneous devices", KDD
2022. Labels are int64 [batch, length]; a negative label (padding, later pieces of a word) counts for nothing.
"""

from models.architecture import architecture
from models.cut import Cut
from models.pretrained import MINILM_EMBED, MINILM_FFN, MINILM_HEADS, MINILM_LAYERS, MINILM_VOCAB
from models.zoo.minilm import DEFAULT_LENGTH, MiniLm, MiniLmSettings, build_minilm
from models.zoo.transformer import TextShape


@architecture(input_dtype="int64", paper="MiniLM (NeurIPS 2020) for the encoder, InclusiveFL (KDD 2022) for the task")
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
    """Build a token classifier (3 classes: outside, begin, inside of one entity type) cut by width and depth."""
    sizes = TextShape(input_shape[0], vocab, embed, classes)
    settings = MiniLmSettings(sizes, heads, ffn, blocks, dropout, pretrained, "none", scaler)
    return build_minilm(cut, settings)
