"""A label per pixel: dilated convolutions and the mean of the feature map, concatenated and resized
to the image.

Source: Chen et al., "Rethinking atrous convolution for semantic image segmentation", arXiv
1706.05587, as in torchvision (models/segmentation/deeplabv3.py).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from models import Cut, architecture

CONVERT = True


class Net(nn.Module):
    def __init__(self, stem: int, atrous: int, classes: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, stem, 3, 2, 1), nn.BatchNorm2d(stem), nn.ReLU(inplace=True)
        )
        self.convs = nn.ModuleList(
            [
                nn.Conv2d(stem, atrous, 1),
                *(nn.Conv2d(stem, atrous, 3, padding=rate, dilation=rate) for rate in (2, 3)),
            ]
        )
        self.pooling = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(stem, atrous, 1), nn.ReLU())
        self.project = nn.Sequential(nn.Conv2d(4 * atrous, atrous, 1), nn.ReLU(), nn.Dropout(0.5))
        self.classifier = nn.Conv2d(atrous, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        input_shape = x.shape[-2:]
        x = self.backbone(x)
        mean = functional.interpolate(
            self.pooling(x), size=x.shape[-2:], mode="bilinear", align_corners=False
        )
        x = self.classifier(
            self.project(torch.cat([*(conv(x) for conv in self.convs), mean], dim=1))
        )
        return functional.interpolate(x, size=input_shape, mode="bilinear", align_corners=False)


@architecture()
def deeplab(cut: Cut, *, input_shape: tuple[int, ...] = (3, 8, 8), classes: int = 3) -> nn.Module:
    """Build the model."""
    return Net(cut.width("stem", 6), cut.width("atrous", 4), cut.classes(classes))
