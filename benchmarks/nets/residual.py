"""ResNet-18.

He et al., "Deep residual learning for image recognition", CVPR 2016, with the names of torchvision.
"""

from torch import Tensor, nn

from models import Cut, architecture


class BasicBlock(nn.Module):
    """Two convolutions added to their input, which a convolution fits where the map shrinks."""

    def __init__(
        self,
        inputs: int,
        inner: int,
        outputs: int,
        stride: int,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(
            inputs,
            inner,
            kernel_size=3,
            stride=stride,
            padding=1,
            bias=False,
        )
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(
            inner,
            outputs,
            kernel_size=3,
            padding=1,
            bias=False,
        )
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential()
        if stride > 1:
            convolution = nn.Conv2d(
                inputs,
                outputs,
                kernel_size=1,
                stride=stride,
                bias=False,
            )
            self.downsample = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return a map of the same size, or of a half."""
        y = self.conv1(x)
        y = self.bn1(y).relu()
        y = self.conv2(y)
        y = self.bn2(y)
        out: Tensor = (y + self.downsample(x)).relu()
        return out


class ResNet(nn.Module):
    """A stem, four stages of two blocks, and a layer on the mean of the map."""

    def __init__(self, cut: Cut, classes: int) -> None:
        super().__init__()
        channels = cut.width("stage1", 64)
        self.conv1 = nn.Conv2d(
            3,
            channels,
            kernel_size=7,
            stride=2,
            padding=3,
            bias=False,
        )
        self.bn1 = nn.BatchNorm2d(channels)
        self.pool = nn.MaxPool2d(3, 2, 1)
        for number, size in enumerate((64, 128, 256, 512), 1):
            outputs = cut.width(f"stage{number}", size)
            # Only the first block of a later stage makes the map smaller.
            stride = 1 if number == 1 else 2
            first_inner = cut.width(f"stage{number}.0", size)
            second_inner = cut.width(f"stage{number}.1", size)
            first = BasicBlock(
                channels,
                first_inner,
                outputs,
                stride,
            )
            second = BasicBlock(
                outputs,
                second_inner,
                outputs,
                stride=1,
            )
            self.add_module(f"layer{number}", nn.Sequential(first, second))
            channels = outputs
        self.fc = nn.Linear(channels, cut.classes(classes))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [batch, classes] of images [batch, 3, height, width]."""
        x = self.conv1(x)
        x = self.bn1(x).relu()
        x = self.pool(x)
        for number in range(1, 5):
            x = self.get_submodule(f"layer{number}")(x)
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


@architecture()
def resnet18(
    cut: Cut,
    *,
    input_shape: tuple[int, ...] = (3, 96, 96),
    classes: int = 10,
) -> nn.Module:
    """Build ResNet-18; the stem takes images of three colours."""
    return ResNet(cut, classes)
