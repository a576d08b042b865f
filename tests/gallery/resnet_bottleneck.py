"""A residual block with a narrow middle and a strided shortcut.

Source: He et al., "Deep residual learning for image recognition", CVPR 2016, as in torchvision
(models/resnet.py).
"""

from torch import Tensor, nn

from models import Cut, architecture

CONVERT = True


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(
        self, inplanes: int, planes: int, stride: int, downsample: nn.Module | None
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, planes * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(planes * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        found: Tensor = self.relu(out)
        return found


@architecture()
def resnet_bottleneck(
    cut: Cut, *, input_shape: tuple[int, ...] = (3, 8, 8), classes: int = 4
) -> nn.Module:
    """Build the model."""
    stem = cut.width("stem", 6)
    planes = cut.width("planes", 4)
    downsample = nn.Sequential(
        nn.Conv2d(stem, planes * 4, 1, 2, bias=False), nn.BatchNorm2d(planes * 4)
    )
    return nn.Sequential(
        nn.Conv2d(3, stem, 3, padding=1, bias=False),
        nn.BatchNorm2d(stem),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        Bottleneck(stem, planes, 2, downsample),
        Bottleneck(planes * 4, planes, 1, None),
        nn.AdaptiveAvgPool2d((1, 1)),
        nn.Flatten(1),
        nn.Linear(planes * 4, cut.classes(classes)),
    )
