"""ConvNeXt-atto: wide depthwise kernels, norms over channels, GELU.

Liu et al., "A ConvNet for the 2020s", CVPR 2022, in the smallest size of ConvNeXt V2's paper.
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture

_DEPTHS = (2, 2, 6, 2)
_WIDTHS = (40, 80, 160, 320)


class ChannelNorm(nn.Module):
    """A layer norm over the channels of a map."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised map [batch, channels, height, width]."""
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    """A depthwise convolution, and two layers with the channels last."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.widen = nn.Linear(channels, 4 * channels)
        self.act = nn.GELU()
        self.narrow = nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), 1e-2))

    def forward(self, x: Tensor) -> Tensor:
        """Return a map of the same size."""
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.narrow(self.act(self.widen(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    """Four stages of blocks, each at half the size of the one before."""

    def __init__(self, widths: list[int], classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), ChannelNorm(widths[0])]
        for stage, width in enumerate(widths):
            if stage:
                layers.append(ChannelNorm(widths[stage - 1]))
                layers.append(nn.Conv2d(widths[stage - 1], width, 2, 2))
            for _ in range(_DEPTHS[stage]):
                layers.append(Block(width))
        self.layers = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(widths[-1], eps=1e-6)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [batch, classes] of images [batch, 3, height, width]."""
        logits: Tensor = self.head(self.norm(self.layers(x).mean([-2, -1])))
        return logits


@architecture()
def convnext_atto(
    cut: Cut,
    *,
    input_shape: tuple[int, ...] = (3, 96, 96),
    classes: int = 10,
) -> nn.Module:
    """Build ConvNeXt-atto."""
    widths = [cut.width(f"stage{stage}", width) for stage, width in enumerate(_WIDTHS)]
    return ConvNext(widths, cut.classes(classes))
