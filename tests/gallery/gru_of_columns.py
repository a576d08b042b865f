"""PyTorch's GRU over the columns of a feature map.

Source: Shi, Bai, Yao, "An end-to-end trainable neural network for image-based sequence
recognition", TPAMI 39, 2017.
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture


class Net(nn.Module):
    """A convolution, a recurrent layer over its columns, and a classifier on the last state."""

    def __init__(self, channels: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, channels, 3, padding=1)
        self.layer = nn.GRU(2 * channels, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        maps = torch.max_pool2d(self.conv(x).relu(), (2, 1))
        out: Tensor = self.head(self.layer(maps.flatten(1, 2).transpose(1, 2))[1][-1])
        return out


@architecture()
def gru_of_columns(
    cut: Cut, *, input_shape: tuple[int, ...] = (2, 4, 6), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.width("channels", 8), cut.width("hidden", 12), cut.classes(classes))
