"""A norm over the channels of each pixel with the channels first, and a global response norm.

Source: Woo et al., "ConvNeXt V2", CVPR 2023 (facebookresearch/ConvNeXt-V2, models/utils.py).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from models import Cut, architecture

ALONE = False


class LayerNorm2d(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class GRN(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((1, 1, 1, channels), 0.5))
        self.beta = nn.Parameter(torch.zeros(1, 1, 1, channels))

    def forward(self, x: Tensor) -> Tensor:
        gx = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
        return self.gamma * (x * (gx / (gx.mean(dim=-1, keepdim=True) + 1e-6))) + self.beta + x


class Net(nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3)
        self.norm = LayerNorm2d(channels)
        self.grn = GRN(channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.grn(functional.gelu(self.norm(self.conv(x))).permute(0, 2, 3, 1))
        out: Tensor = self.head(x.mean((1, 2)))
        return out


@architecture()
def layer_norm_2d(
    cut: Cut, *, input_shape: tuple[int, ...] = (3, 6, 6), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.width("conv", 8), cut.classes(classes))
