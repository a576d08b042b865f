"""Inverted residuals with batch norm: a layer that widens sixfold, a depthwise layer and a narrow
layer.

Source: Sandler et al., "MobileNetV2", CVPR 2018, as in torchvision (pytorch/vision,
models/mobilenetv2.py).
"""

from torch import Tensor, nn

from models import Cut, architecture

CONVERT = True


def conv(
    inputs: int, outputs: int, size: int = 1, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(inplace=True),
    ]


class Block(nn.Module):
    """One inverted residual."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = inputs * 6
        self.residual = stride == 1 and inputs == outputs
        self.conv = nn.Sequential(
            *conv(inputs, wide),
            *conv(wide, wide, 3, stride, wide),
            nn.Conv2d(wide, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return x + out if self.residual else out


@architecture()
def mobilenet_v2(
    cut: Cut, *, input_shape: tuple[int, ...] = (3, 8, 8), classes: int = 4
) -> nn.Module:
    """Build the model."""
    first = cut.width("first", 4)
    second = cut.width("second", 6)
    last = cut.width("last", 16)
    return nn.Sequential(
        *conv(3, first, 3, 2),
        Block(first, first, 1),
        Block(first, second, 2),
        *conv(second, last),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(last, cut.classes(classes)),
    )
