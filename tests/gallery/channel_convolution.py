"""Channels weighted by a convolution over their neighbours; refused, because the order of the channels matters.

Source: Wang et al., "ECA-Net: efficient channel attention for deep convolutional neural networks",
CVPR 2020.
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture

REFUSED = (
    r"units of axis channels are not interchangeable.*module weigh \(Conv1d\); declare it "
    r"with leading=True"
)


class Net(nn.Module):
    """One convolution and the weights of its channels."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3)
        self.weigh = nn.Conv1d(1, 1, 3, padding=1, bias=False)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.hardswish(self.first(x)).mean((2, 3))
        out: Tensor = self.head(x * torch.sigmoid(self.weigh(x.unsqueeze(1))).squeeze(1))
        return out


@architecture()
def channel_convolution(
    cut: Cut, *, input_shape: tuple[int, ...] = (3, 6, 6), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.width("channels", 8), cut.classes(classes))
