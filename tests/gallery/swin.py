"""Attention within shifted windows, with a table of relative positions; whole heads are cut.

Source: Liu et al., "Swin transformer", ICCV 2021 (microsoft/Swin-Transformer,
models/swin_transformer.py).
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture


class Net(nn.Module):
    relative_position_index: Tensor

    def __init__(self, heads: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Conv2d(3, 8, 2, 2)
        self.norm1 = nn.LayerNorm(8)
        self.norm2 = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 3 * heads * 3)
        self.proj = nn.Linear(heads * 3, 8)
        self.relative_position_bias_table = nn.Parameter(torch.randn(9, heads) * 0.1)
        coords = torch.stack(
            torch.meshgrid([torch.arange(2), torch.arange(2)], indexing="ij")
        ).flatten(1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0) + 1
        self.register_buffer("relative_position_index", relative[..., 0] * 3 + relative[..., 1])
        self.mlp = nn.Sequential(nn.Linear(8, hidden), nn.GELU(), nn.Linear(hidden, 8))
        self.head = nn.Linear(8, classes)

    def attend(self, x: Tensor) -> Tensor:
        B_, N, _ = x.shape
        q, k, v = self.qkv(x).reshape(B_, N, 3, self.heads, 3).permute(2, 0, 3, 1, 4)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(
            N, N, -1
        )
        attn = torch.softmax(
            q * 0.6 @ k.transpose(-2, -1) + bias.permute(2, 0, 1).contiguous().unsqueeze(0), -1
        )
        out: Tensor = self.proj((attn @ v).transpose(1, 2).reshape(B_, N, -1))
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).permute(0, 2, 3, 1)
        B, H, W, C = x.shape
        y = torch.roll(self.norm1(x), shifts=(-1, -1), dims=(1, 2))
        windows = (
            y.view(B, H // 2, 2, W // 2, 2, C).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 4, C)
        )
        windows = self.attend(windows).view(-1, 2, 2, C)
        y = (
            windows.view(B, H // 2, W // 2, 2, 2, -1)
            .permute(0, 1, 3, 2, 4, 5)
            .contiguous()
            .view(B, H, W, -1)
        )
        x = x + torch.roll(y, shifts=(1, 1), dims=(1, 2))
        x = x + self.mlp(self.norm2(x))
        out: Tensor = self.head(x.mean((1, 2)))
        return out


@architecture()
def swin(cut: Cut, *, input_shape: tuple[int, ...] = (3, 8, 8), classes: int = 4) -> nn.Module:
    """Build the model."""
    return Net(cut.groups("head", 4), cut.width("hidden", 12), cut.classes(classes))
