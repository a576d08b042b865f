"""Fire modules: a narrow layer, then two parallel kernels; the classifier is a convolution.

Source: Iandola et al., "SqueezeNet", arXiv 1602.07360, as in torchvision (models/squeezenet.py).
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture

CONVERT = True


class Fire(nn.Module):
    def __init__(self, inputs: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeezed, 1)
        self.squeeze_activation = nn.ReLU(inplace=True)
        self.expand1x1 = nn.Conv2d(squeezed, expanded, 1)
        self.expand1x1_activation = nn.ReLU(inplace=True)
        self.expand3x3 = nn.Conv2d(squeezed, expanded, 3, padding=1)
        self.expand3x3_activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.squeeze_activation(self.squeeze(x))
        return torch.cat(
            [
                self.expand1x1_activation(self.expand1x1(x)),
                self.expand3x3_activation(self.expand3x3(x)),
            ],
            1,
        )


@architecture()
def squeezenet(
    cut: Cut, *, input_shape: tuple[int, ...] = (3, 9, 9), classes: int = 4
) -> nn.Module:
    """Build the model."""
    stem = cut.width("stem", 6)
    first = cut.width("expand1", 6)
    second = cut.width("expand2", 8)
    return nn.Sequential(
        nn.Conv2d(3, stem, 3, 2),
        nn.ReLU(inplace=True),
        Fire(stem, cut.width("squeeze1", 4), first),
        Fire(2 * first, cut.width("squeeze2", 4), second),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.Dropout(p=0.5),
        nn.Conv2d(2 * second, cut.classes(classes), 1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d((1, 1)),
        nn.Flatten(),
    )
