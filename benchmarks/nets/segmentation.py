"""A U-Net of separable convolutions for pictures of labels.

Ronneberger et al., "U-Net", MICCAI 2015, with the depthwise separable convolutions that boards
take for it.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from models import Cut, architecture

_WIDTHS = (16, 32, 64, 128)


def separable(inputs: int, outputs: int) -> nn.Sequential:
    """Return a depthwise convolution, one of size 1, a norm and a ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs, bias=False),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """Four sizes down and up, what goes up beside what came down."""

    def __init__(self, widths: list[int], classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        self.down = nn.ModuleList()
        self.up = nn.ModuleList()
        self.wider = nn.ModuleList()
        for width, deeper in pairwise(widths):
            self.down.append(separable(width, deeper))
            self.wider.append(nn.ConvTranspose2d(deeper, width, 2, 2))
            self.up.append(separable(2 * width, width))
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean logits [batch, classes] of images [batch, 3, height, width]."""
        x = self.stem(x)
        kept = []
        for layer in self.down:
            kept.append(x)
            x = layer(functional.max_pool2d(x, 2))
        for number in reversed(range(len(kept))):
            x = torch.cat([kept[number], self.wider[number](x)], 1)
            x = self.up[number](x)
        logits: Tensor = self.head(x).mean((-2, -1))
        return logits


@architecture()
def unet(
    cut: Cut,
    *,
    input_shape: tuple[int, ...] = (3, 96, 96),
    classes: int = 10,
) -> nn.Module:
    """Build the U-Net."""
    widths = [cut.width(f"size{number}", width) for number, width in enumerate(_WIDTHS)]
    return UNet(widths, cut.classes(classes))
