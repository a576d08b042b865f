"""A decoder layer with root mean square norms and a gated feed-forward layer, whose residual stream is cut.

Source: Touvron et al., "LLaMA", arXiv 2302.13971.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from models import Cut, architecture

ALONE = False


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (
            x.float() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        ).type_as(x)


class Net(nn.Module):
    def __init__(self, dim: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, dim)
        self.input_norm = RMSNorm(dim)
        self.norm = nn.RMSNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.head = nn.Linear(dim, classes, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        h = self.input_norm(x)
        q, k, v = (f(h).view(*h.shape[:2], 2, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(h.shape))
        h = self.norm(x)
        x = x + self.down(functional.silu(self.gate(h)) * self.up(h))
        out: Tensor = self.head(x)
        return out


@architecture(input_dtype="int64")
def llama_layer(cut: Cut, *, input_shape: tuple[int, ...] = (6,), classes: int = 13) -> nn.Module:
    """Build the model."""
    return Net(cut.heads("stream", 2, 8) * 2, cut.width("hidden", 12), cut.classes(classes))
