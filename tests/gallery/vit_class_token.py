"""A vision transformer with a class token, learned positions and one projection for queries, keys
and values.

Source: timm (huggingface/pytorch-image-models, timm/models/vision_transformer.py),
VisionTransformer.
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture

ALONE = False
CONVERT = True


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.head_dim = dim // heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)
        self.attn_drop = nn.Dropout(0.1)
        self.proj_drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = (
            self.qkv(x)
            .reshape(B, N, 3, self.num_heads, self.head_dim)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        attn = self.attn_drop((q * self.scale @ k.transpose(-2, -1)).softmax(dim=-1))
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        out: Tensor = self.proj_drop(self.proj(x))
        return out


class Net(nn.Module):
    def __init__(self, dim: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, dim))
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, 4)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(0.1), nn.Linear(hidden, dim)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        out: Tensor = self.head(self.norm(x)[:, 0])
        return out


@architecture()
def vit_class_token(
    cut: Cut, *, input_shape: tuple[int, ...] = (3, 8, 8), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.heads("stream", 4, 4) * 4, cut.width("hidden", 24), cut.classes(classes))
