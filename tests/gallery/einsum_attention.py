"""Attention in Einstein notation, with a separate axis for heads.

Source: the x-transformers and lucidrains style (lucidrains/x-transformers); Vaswani et al., NeurIPS
2017.
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture


class Net(nn.Module):
    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(8, 2, dim) * 0.3) for _ in range(3))
        self.wo = nn.Parameter(torch.randn(2, dim, 8) * 0.3)
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btc,chd->bhtd", x, w) for w in (self.wq, self.wk, self.wv))
        weights = torch.einsum("bhid,bhjd->bhij", q, k).mul(0.5).softmax(-1)
        mixed = torch.einsum("bhij,bhjd->bhid", weights, v)
        x = x + torch.einsum("bhtd,hdc->btc", mixed, self.wo)
        out: Tensor = self.head(x.mean(1))
        return out


@architecture()
def einsum_attention(
    cut: Cut, *, input_shape: tuple[int, ...] = (5, 8), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.width("dim", 6), cut.classes(classes))
