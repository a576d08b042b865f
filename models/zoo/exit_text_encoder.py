"""A Transformer encoder for texts with an exit behind every layer, cut by depth and by width.

Embedding and layers are those of `models.zoo.text_encoder`. The exits are those of DepthFL (Kim,
Yu, Kim, Moon: "DepthFL: Depthwise Federated Learning for Heterogeneous Clients", ICLR 2023), in the
form of InclusiveFL's classifier: a mean over the tokens and a linear layer.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from models.architecture import architecture
from models.cut import Cut
from models.zoo.text_encoder import TextTrunk, shapes_of
from models.zoo.transformer import LayerShape, TextShape


class ExitTextEncoder(TextTrunk):
    """The trunk of a text classifier, with a linear classifier behind every layer."""

    def __init__(self, shape: TextShape, layers: Sequence[LayerShape], rate: float) -> None:
        super().__init__(shape, layers, rate)
        self.exits = nn.ModuleList(nn.Linear(shape.embed, shape.classes) for _ in layers)
        self.draw_positions()

    def forward(self, tokens: Tensor) -> list[Tensor]:
        """Compute the logits of every exit, from the shallowest to the deepest.

        Args:
            tokens: ids, int64 [batch, length].

        Returns:
            For each layer float32 [batch, classes].
        """
        present, penalty = self.mask_of(tokens)
        x = self.embedded(tokens)
        outputs: list[Tensor] = []
        for block, leave in zip(self.blocks, self.exits, strict=True):
            x = block(x, penalty)
            outputs.append(leave(self.mean_of_tokens(x, present)))
        return outputs


@architecture(
    input_dtype="int64",
    paper="layers of HeteroFL (ICLR 2021), exits of DepthFL (ICLR 2023)",
)
def exit_text_encoder(
    cut: Cut,
    *,
    input_shape: tuple[int] = (32,),
    classes: int = 4,
    vocab: int = 2000,
    embed: int = 64,
    heads: int = 4,
    ffn: int = 128,
    blocks: int = 4,
    scaler: bool = True,
) -> ExitTextEncoder:
    """Build a text classifier with an exit behind every layer.

    Embedding, heads and feed-forward units are cut by width, layers and their exits by depth. The
    loss is that of models with exits.
    """
    depth = cut.depth(blocks)
    shape = TextShape(input_shape[0], vocab, cut.width("embed", embed), cut.classes(classes))
    layers = shapes_of(cut, depth, embed, heads, ffn)
    return ExitTextEncoder(shape, layers, cut.rate if scaler else 1.0)
