"""A causal decoder whose classifier is its token embedding.

Source: nanoGPT (karpathy/nanoGPT, model.py).
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from models import Cut, architecture

ALONE = False
CONVERT = True


class Net(nn.Module):
    bias: Tensor

    def __init__(self, vocab: int, length: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.wpe = nn.Embedding(length, dim)
        self.drop = nn.Dropout(0.1)
        self.ln_1, self.ln_2, self.ln_f = (nn.LayerNorm(dim) for _ in range(3))
        self.c_attn = nn.Linear(dim, 3 * dim)
        self.c_proj = nn.Linear(dim, dim)
        self.c_fc = nn.Linear(dim, hidden)
        self.gelu = nn.GELU()
        self.out = nn.Linear(hidden, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.wte.weight = self.lm_head.weight
        self.register_buffer(
            "bias", torch.tril(torch.ones(length, length)).view(1, 1, length, length)
        )

    def attend(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (part.view(B, T, 2, C // 2).transpose(1, 2) for part in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = functional.softmax(
            att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf")), dim=-1
        )
        out: Tensor = self.c_proj((att @ v).transpose(1, 2).contiguous().view(B, T, C))
        return out

    def forward(self, idx: Tensor) -> Tensor:
        x = self.drop(
            self.wte(idx)
            + self.wpe(torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device))
        )
        x = x + self.attend(self.ln_1(x))
        x = x + self.out(self.gelu(self.c_fc(self.ln_2(x))))
        out: Tensor = self.lm_head(self.ln_f(x))
        return out


@architecture(input_dtype="int64")
def tied_gpt(cut: Cut, *, input_shape: tuple[int, ...] = (6,), classes: int = 11) -> nn.Module:
    """Build the model."""
    return Net(
        cut.classes(classes), input_shape[0], cut.heads("stream", 2, 6) * 2, cut.width("hidden", 20)
    )
