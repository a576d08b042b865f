"""A convolutional network for windows of motion sensors, the 1-D sibling of HeteroFL's CNN.

The adaptive method of specification 4 (arXiv:2405.00885) trains a CNN on human activity data and does not describe it.
So this one has the layers of HeteroFL's CNN (Diao, Ding, Tarokh, ICLR 2021): convolution with bias, Scaler, norm, ReLU,
max-pooling in all layers but the last; then the average over time and one linear layer.
"""

from fleet_protocol.errors import ConfigError
from models.architecture import architecture
from models.cut import Cut
from models.zoo.conv import Conv
from models.zoo.layers import Norm, Norming


@architecture(paper="the CNN@HAR task of arXiv:2405.00885; layers of arXiv:2010.01264 in one dimension")
def har_cnn(
    cut: Cut,
    *,
    input_shape: tuple[int, int] = (6, 128),
    classes: int = 7,
    channels: tuple[int, ...] = (32, 64, 128),
    kernel: int = 5,
    norm: Norm = "sbn",
    scaler: bool = True,
) -> Conv:
    """Build a CNN for windows of a 6-axis watch; the channels of every layer are cut by width."""
    norming = Norming(norm, cut.rate if scaler else 1.0)
    if kernel < 1 or kernel % 2 == 0:
        raise ConfigError(f"kernel {kernel} must be odd, so that a convolution keeps the length")
    if not channels or input_shape[1] >> (len(channels) - 1) < 1:
        raise ConfigError(
            f"input_shape {input_shape} does not fit {len(channels)} layers, all but one halve its length"
        )
    return Conv(input_shape[0], cut.widths("conv", channels), cut.classes(classes), (kernel,), norming)
