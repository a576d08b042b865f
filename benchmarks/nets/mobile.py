"""Inverted residuals: MobileNetV2, MobileNetV3-small and EfficientNet-lite0.

Sandler et al., "MobileNetV2", CVPR 2018; Howard et al., "Searching for MobileNetV3", ICCV 2019;
EfficientNet-lite is EfficientNet-B0 (Tan and Le, ICML 2019) without weights for channels, with
ReLU6, and with its first and last stage as they are.
"""

from dataclasses import dataclass, replace

from torch import Tensor, nn

from models import Cut, architecture


def multiple_of_eight(channels: float) -> int:
    """Return channels rounded to a multiple of eight, and not down by more than a tenth."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


@dataclass(frozen=True)
class Residual:
    """An inverted residual.

    Attributes:
        inputs: channels that come in.
        wide: channels between.
        outputs: channels that go out.
        kernel: height and width of the depthwise kernel.
        stride: stride of the depthwise convolution.
        squeezed: channels that weights for channels are computed from; 0 for no such weights.
        act: activation behind the first two convolutions.
    """

    inputs: int
    wide: int
    outputs: int
    kernel: int
    stride: int
    squeezed: int
    act: type[nn.Module]


def normed(convolution: nn.Conv2d, act: type[nn.Module] | None) -> list[nn.Module]:
    """Return a convolution with its batch norm and activation."""
    layers: list[nn.Module] = [convolution, nn.BatchNorm2d(convolution.out_channels)]
    if act is not None:
        layers.append(act())
    return layers


class Weighted(nn.Module):
    """Squeeze and excite: channels weighted by what the whole map holds."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.squeeze = nn.Conv2d(channels, squeezed, 1)
        self.act = nn.ReLU()
        self.excite = nn.Conv2d(squeezed, channels, 1)
        self.gate = nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        """Return the map with weighted channels."""
        weights = self.gate(self.excite(self.act(self.squeeze(self.pool(x)))))
        weighted: Tensor = x * weights
        return weighted


class Block(nn.Module):
    """Widen, convolve each channel by itself, weigh channels, narrow."""

    def __init__(self, form: Residual) -> None:
        super().__init__()
        self.adds = form.stride == 1 and form.inputs == form.outputs
        layers: list[nn.Module] = []
        if form.wide != form.inputs:
            layers += normed(nn.Conv2d(form.inputs, form.wide, 1, bias=False), form.act)
        depthwise = nn.Conv2d(
            form.wide,
            form.wide,
            form.kernel,
            form.stride,
            form.kernel // 2,
            groups=form.wide,
            bias=False,
        )
        layers += normed(depthwise, form.act)
        if form.squeezed:
            layers.append(Weighted(form.wide, form.squeezed))
        layers += normed(nn.Conv2d(form.wide, form.outputs, 1, bias=False), None)
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return a map of the same size, or of a half."""
        y: Tensor = self.layers(x)
        return x + y if self.adds else y


class Classifier(nn.Module):
    """A stem, inverted residuals, a last convolution and layers on the mean of the map."""

    def __init__(
        self,
        stem: nn.Module,
        blocks: list[nn.Module],
        last: nn.Module,
        head: nn.Module,
    ) -> None:
        super().__init__()
        self.stem = stem
        self.blocks = nn.Sequential(*blocks)
        self.last = last
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [batch, classes] of images [batch, 3, height, width]."""
        logits: Tensor = self.head(self.pool(self.last(self.blocks(self.stem(x)))).flatten(1))
        return logits


@architecture()
def mobilenet_v2(
    cut: Cut,
    *,
    input_shape: tuple[int, ...] = (3, 96, 96),
    classes: int = 10,
) -> nn.Module:
    """Build MobileNetV2 at full width."""
    # Expansion, channels, repeats, stride: table 2 of the paper.
    stages = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )
    channels = cut.width("stem", 32)
    stem = nn.Sequential(*normed(nn.Conv2d(3, channels, 3, 2, 1, bias=False), nn.ReLU6))
    blocks: list[nn.Module] = []
    for number, (expansion, whole, repeats, stride) in enumerate(stages):
        outputs = cut.width(f"stage{number}", whole)
        for repeat in range(repeats):
            form = Residual(
                channels,
                channels * expansion,
                outputs,
                3,
                stride if repeat == 0 else 1,
                0,
                nn.ReLU6,
            )
            blocks.append(Block(form))
            channels = outputs
    wide = cut.width("last", 1280)
    last = nn.Sequential(*normed(nn.Conv2d(channels, wide, 1, bias=False), nn.ReLU6))
    return Classifier(stem, blocks, last, nn.Linear(wide, cut.classes(classes)))


@architecture()
def mobilenet_v3_small(
    cut: Cut,
    *,
    input_shape: tuple[int, ...] = (3, 96, 96),
    classes: int = 10,
) -> nn.Module:
    """Build MobileNetV3-small at full width."""
    # Kernel, channels between, channels out, weights for channels, hard swish, stride: table 2.
    rows = (
        (3, 16, 16, True, False, 2),
        (3, 72, 24, False, False, 2),
        (3, 88, 24, False, False, 1),
        (5, 96, 40, True, True, 2),
        (5, 240, 40, True, True, 1),
        (5, 240, 40, True, True, 1),
        (5, 120, 48, True, True, 1),
        (5, 144, 48, True, True, 1),
        (5, 288, 96, True, True, 2),
        (5, 576, 96, True, True, 1),
        (5, 576, 96, True, True, 1),
    )
    channels = cut.width("stem", 16)
    stem = nn.Sequential(*normed(nn.Conv2d(3, channels, 3, 2, 1, bias=False), nn.Hardswish))
    blocks: list[nn.Module] = []
    for number, (kernel, wide, outputs, weighs, swish, stride) in enumerate(rows):
        between = channels if number == 0 else cut.width(f"wide{number}", wide)
        squeezed = 0
        if weighs:
            squeezed = cut.width(f"squeezed{number}", multiple_of_eight(wide / 4))
        form = Residual(
            channels,
            between,
            cut.width(f"out{outputs}", outputs),
            kernel,
            stride,
            squeezed,
            nn.Hardswish if swish else nn.ReLU,
        )
        blocks.append(Block(form))
        channels = form.outputs
    top = cut.width("last", 576)
    last = nn.Sequential(*normed(nn.Conv2d(channels, top, 1, bias=False), nn.Hardswish))
    hidden = cut.width("hidden", 1024)
    head = nn.Sequential(
        nn.Linear(top, hidden), nn.Hardswish(), nn.Linear(hidden, cut.classes(classes))
    )
    return Classifier(stem, blocks, last, head)


@architecture()
def efficientnet_lite0(
    cut: Cut,
    *,
    input_shape: tuple[int, ...] = (3, 96, 96),
    classes: int = 10,
) -> nn.Module:
    """Build EfficientNet-lite0."""
    # Expansion, channels, repeats, stride, kernel.
    stages = (
        (1, 16, 1, 1, 3),
        (6, 24, 2, 2, 3),
        (6, 40, 2, 2, 5),
        (6, 80, 3, 2, 3),
        (6, 112, 3, 1, 5),
        (6, 192, 4, 2, 5),
        (6, 320, 1, 1, 3),
    )
    channels = cut.width("stem", 32)
    stem = nn.Sequential(*normed(nn.Conv2d(3, channels, 3, 2, 1, bias=False), nn.ReLU6))
    blocks: list[nn.Module] = []
    for number, (expansion, whole, repeats, stride, kernel) in enumerate(stages):
        outputs = cut.width(f"stage{number}", whole)
        first = Residual(channels, channels * expansion, outputs, kernel, stride, 0, nn.ReLU6)
        blocks.append(Block(first))
        following = replace(first, inputs=outputs, wide=outputs * expansion, stride=1)
        for _ in range(repeats - 1):
            blocks.append(Block(following))
        channels = outputs
    wide = cut.width("last", 1280)
    last = nn.Sequential(*normed(nn.Conv2d(channels, wide, 1, bias=False), nn.ReLU6))
    return Classifier(stem, blocks, last, nn.Linear(wide, cut.classes(classes)))
