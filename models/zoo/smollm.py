"""A language model of SmolLM's form and, by default, of the sizes of SmolLM-135M; it trains whole, or adapters alone.

Allal et al.: "SmolLM - blazingly fast and remarkably powerful", 2024, for the sizes; the form is Llama's (Touvron et
al., 2023). The package has no weights: give some to `shoal export --start`.
"""

from torch import nn

from models.architecture import architecture
from models.cut import Cut
from models.zoo.adapters import Adapters, with_adapters
from models.zoo.decoder import DecoderShape, build_decoder


@architecture(input_dtype="int64", paper="SmolLM-135M, 2024")
def smollm(
    cut: Cut,
    *,
    input_shape: tuple[int] = (64,),
    classes: int = 49152,
    embed: int = 576,
    heads: int = 9,
    shared_heads: int = 3,
    head_dim: int = 64,
    ffn: int = 1536,
    blocks: int = 30,
    theta: float = 10000.0,
    rank: int = 0,
    alpha: float = 16.0,
    targets: tuple[str, ...] = ("layers.*.q_proj", "layers.*.v_proj"),
) -> nn.Module:
    """Build a causal language model, whose labels are the tokens, one at each position.

    With rank 0 all of it trains, and heads and units of its gated networks are cut by width. With a rank it is frozen
    beside adapters of that rank, which is all that is cut then.
    """
    del input_shape  # positions are angles, so any length will do
    shape = DecoderShape(classes, embed, heads, shared_heads, head_dim, ffn, blocks, theta)
    if not rank:
        return build_decoder(cut, shape)
    model = build_decoder(cut.whole(), shape)
    return with_adapters(model, Adapters(rank, alpha, tuple(targets)), cut)
