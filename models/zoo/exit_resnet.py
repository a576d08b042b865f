"""A pre-activation ResNet with an exit behind every stage, cut by depth and by width.

Kim, Yu, Kim, Moon: "DepthFL: Depthwise Federated Learning for Heterogeneous Clients", ICLR 2023,
cut a ResNet-18 behind each of its four stages and give every stage a classifier. Stages and blocks
here are those of `models.zoo.preresnet`, so that widths can be cut as well; an exit is a norm, an
average over the places and a linear layer, where DepthFL has further convolutions (specification
8.1).
"""

from collections.abc import Sequence

from torch import Tensor, nn

from fleet_protocol.errors import ConfigError
from models.architecture import architecture
from models.cut import Cut
from models.zoo.layers import Norm, NormStyle, zero_linear_biases
from models.zoo.preresnet import PreActivationBlock, ScaledNorm


class Exit(nn.Module):
    """A norm, global average pooling and a linear classifier."""

    def __init__(self, channels: int, classes: int, norm_style: NormStyle) -> None:
        super().__init__()
        self.norm = ScaledNorm(channels, norm_style)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits, float32 [batch, classes], of float32 [batch, channels, height, width]."""
        logits: Tensor = self.head(self.norm(x).mean((2, 3)))
        return logits


class ExitResNet(nn.Module):
    """A convolution, and stages of blocks, each with an exit.

    Args:
        input_channels: channels of a sample.
        streams: channels of the residual stream by stage.
        inners: channels inside the blocks, by stage and block.
        depth: stages to build, from the bottom.
        classes: logits of every exit.
        norm_style: norm and Scaler before every convolution and exit.
    """

    def __init__(
        self,
        input_channels: int,
        streams: Sequence[int],
        inners: Sequence[Sequence[int]],
        depth: int,
        classes: int,
        norm_style: NormStyle,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(input_channels, streams[0], 3, padding=1, bias=False)
        self.stages = nn.ModuleList()
        self.exits = nn.ModuleList()
        inputs = streams[0]
        for place in range(depth):
            outputs = streams[place]
            blocks = nn.Sequential()
            for number, inner in enumerate(inners[place]):
                # The first block of every stage but the first halves the sides.
                stride = 2 if place > 0 and number == 0 else 1
                block = PreActivationBlock(inputs, inner, outputs, norm_style, stride=stride)
                blocks.append(block)
                inputs = outputs
            self.stages.append(blocks)
            self.exits.append(Exit(outputs, classes, norm_style))
        zero_linear_biases(self)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Compute the logits of every exit, from the shallowest to the deepest.

        Args:
            x: float32 [batch, channels, height, width].

        Returns:
            For each stage float32 [batch, classes].
        """
        x = self.conv1(x)
        outputs: list[Tensor] = []
        for stage, leave in zip(self.stages, self.exits, strict=True):
            x = stage(x)
            outputs.append(leave(x))
        return outputs


@architecture(paper="stages of arXiv:2010.01264, exits of DepthFL (ICLR 2023)")
def exit_resnet(
    cut: Cut,
    *,
    input_shape: tuple[int, int, int] = (3, 32, 32),
    classes: int = 10,
    channels: tuple[int, ...] = (64, 128, 256, 512),
    blocks: tuple[int, ...] = (2, 2, 2, 2),
    norm: Norm = "sbn",
    scaler: bool = True,
) -> ExitResNet:
    """Build a ResNet with an exit behind every stage.

    Stages are cut by depth; residual streams and the channels inside blocks by width. The loss is
    exits-cross-entropy.
    """
    norm_style = NormStyle(norm, cut.rate if scaler else 1.0)
    if len(blocks) != len(channels) or not blocks or min(blocks) < 1:
        raise ConfigError(
            f"blocks {blocks} must name at least 1 block for each of the stages of channels "
            f"{channels}"
        )
    depth = cut.depth(len(channels))
    streams = cut.widths("stage", channels)
    inners: list[tuple[int, ...]] = []
    for stage, (size, count) in enumerate(zip(channels, blocks, strict=True), 1):
        inners.append(cut.widths(f"stage{stage}.block", [size] * count))
    labels = cut.classes(classes)
    return ExitResNet(input_shape[0], streams, inners, depth, labels, norm_style)
