"""DS-CNN: a keyword spotter of depthwise separable convolutions over a spectrogram.

Zhang et al., "Hello edge: keyword spotting on microcontrollers", arXiv 1711.07128, its small size
as MLPerf Tiny has it.
"""

from torch import nn

from models import Cut, architecture

_BLOCKS = 4


@architecture()
def ds_cnn(
    cut: Cut,
    *,
    input_shape: tuple[int, ...] = (1, 49, 10),
    classes: int = 12,
) -> nn.Module:
    """Build the keyword spotter."""
    channels = cut.width("channels", 64)
    layers: list[nn.Module] = [
        nn.Conv2d(1, channels, (10, 4), (2, 2), (5, 1), bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
    ]
    for _ in range(_BLOCKS):
        layers += [
            nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        ]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, cut.classes(classes))]
    return nn.Sequential(*layers)
