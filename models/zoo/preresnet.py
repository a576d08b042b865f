"""The pre-activation ResNet of HeteroFL and FedRolex for CIFAR, with static batch norm and Scaler.

He, Zhang, Ren, Sun: "Identity mappings in deep residual networks", ECCV 2016, as Diao, Ding, Tarokh
("HeteroFL", ICLR 2021) and Alam, Liu, Yan, Zhang ("FedRolex", NeurIPS 2022) use it: no norm behind
the first convolution, a Scaler before every norm, shortcuts fed with the activated input.

The numbers HeteroFL published are those of one block in the first three stages and two in the last;
the released code has had two in every stage since March 2021, and FedRolex follows it
(specification 1.7).
"""

from torch import Tensor, nn

from fleet_protocol.errors import ConfigError
from models.architecture import architecture
from models.cut import Cut
from models.zoo.layers import Norm, NormStyle, Scaler, zero_linear_biases


class ScaledNorm(nn.Module):
    """Scaler, norm and ReLU, which stand before every convolution of a block."""

    def __init__(self, channels: int, norm_style: NormStyle) -> None:
        super().__init__()
        self.scaler = Scaler(norm_style.rate)
        self.norm = norm_style.layer(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Compute float32 of the shape of x, float32 [batch, channels, height, width]."""
        out: Tensor = self.norm(self.scaler(x)).relu()
        return out


class PreActivationBlock(nn.Module):
    """Two convolutions added to the input, each behind its norm."""

    def __init__(
        self, inputs: int, inner: int, outputs: int, norm_style: NormStyle, *, stride: int
    ) -> None:
        """Make the block.

        With a stride of 1 it has an identity shortcut and needs `inputs == outputs`.
        """
        super().__init__()
        self.norm1 = ScaledNorm(inputs, norm_style)
        self.conv1 = nn.Conv2d(inputs, inner, 3, stride=stride, padding=1, bias=False)
        self.norm2 = ScaledNorm(inner, norm_style)
        self.conv2 = nn.Conv2d(inner, outputs, 3, padding=1, bias=False)
        self.shortcut = (
            None if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Compute float32 [batch, outputs, ...] from [batch, inputs, height, width].

        Sides are divided by the stride.
        """
        activated = self.norm1(x)
        kept = x if self.shortcut is None else self.shortcut(activated)
        out: Tensor = self.conv2(self.norm2(self.conv1(activated))) + kept
        return out


class PreResNet(nn.Module):
    """A convolution, stages of blocks, a last norm, global average pooling and a linear classifier.

    Channels are those of the residual stream, by stage, and of the blocks inside, by stage and
    block.
    """

    def __init__(
        self,
        input_channels: int,
        streams: tuple[int, ...],
        inners: tuple[tuple[int, ...], ...],
        classes: int,
        norm_style: NormStyle,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(input_channels, streams[0], 3, padding=1, bias=False)
        self.blocks = nn.ModuleList()
        inputs = streams[0]
        for stage, (outputs, widths) in enumerate(zip(streams, inners, strict=True)):
            for number, inner in enumerate(widths):
                # The first block of every stage but the first halves the sides.
                stride = 2 if stage > 0 and number == 0 else 1
                self.blocks.append(
                    PreActivationBlock(inputs, inner, outputs, norm_style, stride=stride)
                )
                inputs = outputs
        self.norm = ScaledNorm(inputs, norm_style)
        self.head = nn.Linear(inputs, classes)
        zero_linear_biases(self)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits, float32 [batch, classes], of float32 [batch, channels, height, width]."""
        x = self.conv1(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x).mean((2, 3)))
        return logits


@architecture(paper="arXiv:2010.01264 (blocks 1, 1, 1, 2), arXiv:2212.01548 (blocks 2, 2, 2, 2)")
def preresnet18(
    cut: Cut,
    *,
    input_shape: tuple[int, int, int] = (3, 32, 32),
    classes: int = 10,
    channels: tuple[int, ...] = (64, 128, 256, 512),
    blocks: tuple[int, ...] = (1, 1, 1, 2),
    norm: Norm = "sbn",
    scaler: bool = True,
) -> PreResNet:
    """Build a pre-activation ResNet.

    Residual streams and the channels inside blocks are cut by width.
    """
    norm_style = NormStyle(norm, cut.rate if scaler else 1.0)
    if len(blocks) != len(channels) or not blocks or min(blocks) < 1:
        raise ConfigError(
            f"blocks {blocks} must name at least 1 block for each of the stages of channels "
            f"{channels}"
        )
    leading = norm_style.is_grouped
    streams = cut.widths("stage", channels, leading=leading)
    inners: list[tuple[int, ...]] = []
    for stage, (size, count) in enumerate(zip(channels, blocks, strict=True), 1):
        # Each block has its own inner channels; all blocks of a stage share its stream.
        inners.append(cut.widths(f"stage{stage}.block", [size] * count, leading=leading))
    return PreResNet(input_shape[0], streams, tuple(inners), cut.classes(classes), norm_style)
