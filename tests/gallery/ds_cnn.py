"""A keyword spotter: depthwise separable convolutions over a spectrogram.

Source: Zhang et al., "Hello edge: keyword spotting on microcontrollers", arXiv 1711.07128.
"""

from torch import nn

from models import Cut, architecture

CONVERT = True


@architecture()
def ds_cnn(cut: Cut, *, input_shape: tuple[int, ...] = (1, 12, 10), classes: int = 4) -> nn.Module:
    """Build the model."""
    channels = cut.width("channels", 8)

    def norm() -> list[nn.Module]:
        return [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]

    return nn.Sequential(
        nn.Conv2d(1, channels, (10, 4), stride=(2, 2), padding=(5, 1)),
        *norm(),
        nn.Dropout2d(0.2),
        nn.Conv2d(channels, channels, 3, padding=1, groups=channels),
        *norm(),
        nn.Conv2d(channels, channels, 1),
        *norm(),
        nn.AvgPool2d((3, 2)),
        nn.Flatten(),
        nn.Linear(channels * 4, cut.classes(classes)),
    )
