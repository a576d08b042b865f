"""A causal decoder with RMS norms, rotary positions, grouped queries and gated feed-forward.

Zhang, Sennrich: "Root mean square layer normalization", NeurIPS 2019; Su et al.: "RoFormer",
Neurocomputing 2024; Ainslie et al.: "GQA", EMNLP 2023; Shazeer: "GLU variants improve transformer",
2020. Embedding and projection are one table. Its layers have the names of the published weights of
this form, so that they load as they are.

A width removes whole heads, a head of keys and values with the queries that share it, because each
dimension of a rotary head has its own angle. It removes single units of the gated network. The
residual stream is whole in every tier.

Allal et al.: "SmolLM - blazingly fast and remarkably powerful", 2024, for the default sizes; the
form is Llama's (Touvron et al., 2023). The package does not include weights: load some with `shoal
export --start`.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from fleet_protocol.errors import ConfigError
from models.architecture import architecture
from models.cut import Cut
from models.zoo.adapters import Adapters, with_adapters
from models.zoo.transformer import future_penalty

_DEVIATION = 0.02


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder.

    Attributes:
        embed: units of the residual stream.
        heads: number of heads of queries.
        shared_heads: number of heads of keys and values; each serves an equal number of query
            heads.
        head_dim: dimensions of each head, an even number.
        ffn: units of the gated network.
        theta: base of the angles; the longest wave has about ``2 * pi * theta`` positions.
        eps: added to the mean square by the norms.

    Raises:
        ConfigError: the sizes are inconsistent.
    """

    vocab: int
    embed: int
    heads: int
    shared_heads: int
    head_dim: int
    ffn: int
    blocks: int
    theta: float = 10000.0
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.shared_heads < 1 or self.heads % self.shared_heads or self.head_dim % 2:
            raise ConfigError(
                f"{self.heads} heads of queries, {self.shared_heads} of keys and values with"
                f" {self.head_dim} dimensions: the first must be a multiple of the second, and"
                " the dimensions must be even"
            )


class RmsNorm(nn.Module):
    """Divides by the root of the mean square of a row, and scales."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise float32 [..., width]."""
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.weight


class RotaryAttention(nn.Module):
    """Causal attention whose queries and keys are rotated by their positions.

    Each head of keys and values is shared by a group of heads of queries.
    """

    def __init__(self, shape: DecoderShape, shared_heads: int) -> None:
        super().__init__()
        self.shape = shape
        self.shared = shared_heads
        # Queries that share a head of keys and values.
        self.group = shape.heads // shape.shared_heads
        width = shared_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.embed, self.group * width, bias=False)
        self.k_proj = nn.Linear(shape.embed, width, bias=False)
        self.v_proj = nn.Linear(shape.embed, width, bias=False)
        self.o_proj = nn.Linear(self.group * width, shape.embed, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Attend: float32 [batch, length, embed] in and out, angles [length, head_dim / 2]."""
        batch = x.shape[0]
        length = x.shape[1]
        # One row of queries for each shared head: its group of heads one behind the other.
        head_dim = self.shape.head_dim
        query = self.q_proj(x).unflatten(-1, (self.shared, self.group, head_dim))
        query = query.permute(0, 2, 3, 1, 4)
        key = self._shared_heads(self.k_proj(x))
        value = self._shared_heads(self.v_proj(x))
        query = _rotate(query, angles)
        query = query.reshape(batch, self.shared, self.group * length, head_dim)
        key = _rotate(key, angles)
        # The product of one head with all queries of its group.
        scores = query @ key.transpose(-1, -2) * head_dim**-0.5
        scores = scores.unflatten(2, (self.group, length))
        # The penalty has one row for each position, whichever query head.
        scores = scores + future_penalty(length, x)
        shares = torch.softmax(scores, -1)
        mixed = shares.flatten(2, 3) @ value
        mixed = mixed.unflatten(2, (self.group, length))  # type: ignore[no-untyped-call]
        mixed = mixed.permute(0, 3, 1, 2, 4)
        out: Tensor = self.o_proj(mixed.reshape(batch, length, -1))
        return out

    def _shared_heads(self, x: Tensor) -> Tensor:
        """Bring [batch, length, heads * head_dim] to [batch, heads, length, head_dim]."""
        sizes = (self.shared, self.shape.head_dim)
        heads: Tensor = x.unflatten(-1, sizes)  # type: ignore[no-untyped-call]
        return heads.transpose(1, 2)


class GatedNetwork(nn.Module):
    """``down(silu(gate x) * up x)``."""

    def __init__(self, embed: int, units: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(embed, units, bias=False)
        self.up_proj = nn.Linear(embed, units, bias=False)
        self.down_proj = nn.Linear(units, embed, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute float32 [..., embed] from the same."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """Attention and a gated network, each on the normalised stream and added to it."""

    def __init__(self, shape: DecoderShape, shared_heads: int, units: int) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.embed, shape.eps)
        self.self_attn = RotaryAttention(shape, shared_heads)
        self.post_attention_layernorm = RmsNorm(shape.embed, shape.eps)
        self.mlp = GatedNetwork(shape.embed, units)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Compute float32 [batch, length, embed] from the same; angles as in the attention."""
        x = x + self.self_attn(self.input_layernorm(x), angles)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Token table, layers, a norm, and the token table again."""

    def __init__(self, shape: DecoderShape, layers: nn.ModuleList) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.embed)
        self.layers = layers
        self.norm = RmsNorm(shape.embed, shape.eps)
        for layer in self.modules():
            if isinstance(layer, (nn.Linear, nn.Embedding)):
                nn.init.normal_(layer.weight, std=_DEVIATION)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits of the next tokens, float32 [batch, length, vocab].

        Args:
            tokens: token ids, int64 [batch, length].
        """
        x = self.embed_tokens(tokens)
        half = self.shape.head_dim // 2
        waves = self.shape.theta ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
        # Computed, not stored: a table would be a buffer of a fixed length.
        angles = torch.arange(tokens.shape[1], device=x.device, dtype=x.dtype)[:, None] * waves
        for layer in self.layers:
            x = layer(x, angles)
        return functional.linear(self.norm(x), self.embed_tokens.weight)


def build_decoder(cut: Cut, shape: DecoderShape) -> Decoder:
    """Build a decoder of the shape of the global model.

    Its axes are ``block<n>.heads`` and ``block<n>.ffn``.
    """
    depth = cut.depth(shape.blocks)
    # Tokens are the labels, so the table of tokens has the label axis.
    shape = replace(shape, vocab=cut.classes(shape.vocab))
    layers = nn.ModuleList()
    for number in range(1, depth + 1):
        heads = cut.groups(f"block{number}.heads", shape.shared_heads)
        units = cut.width(f"block{number}.ffn", shape.ffn)
        layers.append(DecoderLayer(shape, heads, units))
    return Decoder(shape, layers)


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs from the first and second half of each head by an angle for each position."""
    # Published weights of this form pair the two halves, not neighbouring entries.
    first, second = x.chunk(2, -1)
    cos = angles.cos()
    sin = angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


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
    """Build a causal language model of SmolLM's form; its labels are the tokens of each position.

    With rank 0 the whole model trains, and a width cuts heads and units of its gated networks. With
    a rank, the model is frozen and has adapters of that rank; a width then cuts only the adapters.
    """
    del input_shape  # positions are angles, so any length works
    shape = DecoderShape(classes, embed, heads, shared_heads, head_dim, ffn, blocks, theta)
    if not rank:
        return build_decoder(cut, shape)
    # Adapters train beside a frozen model, which is the same in every tier.
    frozen = build_decoder(cut.whole(), shape)
    return with_adapters(frozen, Adapters(rank, alpha, tuple(targets)), cut)
