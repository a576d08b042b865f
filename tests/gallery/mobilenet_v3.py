"""Inverted residuals with hard swish, and channels weighted through two small convolutions.

Source: Howard et al., "Searching for MobileNetV3", ICCV 2019, as in torchvision
(models/mobilenetv3.py).
"""

from torch import Tensor, nn

from models import Cut, architecture

CONVERT = True


class Excited(nn.Module):
    """Channels weighted by what the map holds."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)
        self.activation = nn.ReLU(inplace=True)
        self.scale = nn.Hardsigmoid(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x * self.scale(self.fc2(self.activation(self.fc1(self.avgpool(x)))))
        return out


@architecture()
def mobilenet_v3(
    cut: Cut, *, input_shape: tuple[int, ...] = (3, 8, 8), classes: int = 4
) -> nn.Module:
    """Build the model."""
    stem = cut.width("stem", 8)
    wide = cut.width("wide", 12)
    squeezed = cut.width("squeezed", 4)
    return nn.Sequential(
        nn.Conv2d(3, stem, 3, 2, 1, bias=False),
        nn.BatchNorm2d(stem, eps=0.001, momentum=0.01),
        nn.Hardswish(inplace=True),
        nn.Conv2d(stem, wide, 1, bias=False),
        nn.BatchNorm2d(wide),
        nn.Hardswish(inplace=True),
        nn.Conv2d(wide, wide, 5, 1, 2, groups=wide, bias=False),
        nn.BatchNorm2d(wide),
        Excited(wide, squeezed),
        nn.Hardswish(inplace=True),
        nn.Conv2d(wide, stem, 1, bias=False),
        nn.BatchNorm2d(stem),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(stem, cut.classes(classes)),
    )
