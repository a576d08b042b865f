"""An inverted residual with SiLU, weighted channels and stochastic depth in training.

Source: Tan and Le, "EfficientNet", ICML 2019, as in torchvision (models/efficientnet.py,
ops/stochastic_depth.py).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from models import Cut, architecture

CONVERT = True


class StochasticDepth(nn.Module):
    """Drops the block of a whole sample."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        noise = torch.empty([x.shape[0]] + [1] * (x.ndim - 1), dtype=x.dtype, device=x.device)
        return x * noise.bernoulli_(1 - self.p).div_(1 - self.p)


class MBConv(nn.Module):
    def __init__(self, channels: int, wide: int, squeezed: int) -> None:
        super().__init__()
        self.expand = nn.Conv2d(channels, wide, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(wide)
        self.depthwise = nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False)
        self.bn2 = nn.BatchNorm2d(wide)
        self.act = nn.SiLU(inplace=True)
        self.squeeze = nn.Conv2d(wide, squeezed, 1)
        self.excite = nn.Conv2d(squeezed, wide, 1)
        self.project = nn.Conv2d(wide, channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.stochastic_depth = StochasticDepth(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn2(self.depthwise(self.act(self.bn1(self.expand(x))))))
        weights = torch.sigmoid(
            self.excite(self.act(self.squeeze(functional.adaptive_avg_pool2d(y, 1))))
        )
        out: Tensor = x + self.stochastic_depth(self.bn3(self.project(weights * y)))
        return out


@architecture()
def efficientnet(
    cut: Cut, *, input_shape: tuple[int, ...] = (3, 8, 8), classes: int = 4
) -> nn.Module:
    """Build the model."""
    stem = cut.width("stem", 6)
    return nn.Sequential(
        nn.Conv2d(3, stem, 3, 2, 1, bias=False),
        nn.BatchNorm2d(stem),
        nn.SiLU(inplace=True),
        MBConv(stem, cut.width("wide", 16), cut.width("squeezed", 4)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2, inplace=True),
        nn.Linear(stem, cut.classes(classes)),
    )
