"""FedRolex's Transformer for predicting the next word.

Alam, Liu, Yan, Zhang: "FedRolex: Model-heterogeneous federated learning with rolling sub-model extraction", NeurIPS
2022. The sizes are those of the released code, which specification 2.5 follows; the paper has heads of 12 dimensions
and ReLU instead (`head_dim=12, activation="relu"`). All axes are cut. The token table has a row for each word and none
for a mask symbol, which this task does not use.
"""

from torch import nn

from fleet_protocol.errors import ConfigError
from models.architecture import architecture
from models.cut import Cut
from models.zoo.language_model import LanguageModel
from models.zoo.transformer import Activation, LayerShape, LayerStyle, TextShape, encoder_layers


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
        raise ConfigError(f"{heads} heads of {head_dim} dimensions cannot be built; choose at least 1 of each")
    depth, width = cut.depth(blocks), cut.width("embed", embed)
    style = LayerStyle(cut.rate if scaler else 1.0, dropout, dropout, activation)
    vocab = cut.classes(classes)
    return LanguageModel(
        nn.Embedding(vocab, width),
        encoder_layers(cut, depth, width, LayerShape(heads, head_dim, ffn), style),
        TextShape(input_shape[0], vocab, width, vocab),
        style,
    )
