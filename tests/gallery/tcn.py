"""Causal dilated convolutions with weight norm, whose surplus outputs are cut off.

Source: Bai, Kolter, Koltun, "An empirical evaluation of generic convolutional and recurrent
networks for sequence modeling", arXiv 1803.01271 (locuslab/TCN, tcn.py).
"""

from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from models import Cut, architecture

ALONE = False
CONVERT = True


class Chomp1d(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.chomp_size = size

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, : -self.chomp_size].contiguous()


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, dilation: int) -> None:
        super().__init__()
        padding = 2 * dilation
        self.conv1 = weight_norm(nn.Conv1d(inputs, outputs, 3, padding=padding, dilation=dilation))
        self.conv2 = weight_norm(nn.Conv1d(outputs, outputs, 3, padding=padding, dilation=dilation))
        self.net = nn.Sequential(
            self.conv1,
            Chomp1d(padding),
            nn.ReLU(),
            nn.Dropout(0.2),
            self.conv2,
            Chomp1d(padding),
            nn.ReLU(),
            nn.Dropout(0.2),
        )
        self.downsample = nn.Conv1d(inputs, outputs, 1)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.net(x) + self.downsample(x))
        return out


class Net(nn.Module):
    def __init__(self, first: int, second: int, classes: int) -> None:
        super().__init__()
        self.tcn = nn.Sequential(Block(2, first, 1), Block(first, second, 2))
        self.linear = nn.Linear(second, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.tcn(x)[:, :, -1])
        return out


@architecture()
def tcn(cut: Cut, *, input_shape: tuple[int, ...] = (2, 9), classes: int = 4) -> nn.Module:
    """Build the model."""
    return Net(cut.width("first", 6), cut.width("second", 8), cut.classes(classes))
