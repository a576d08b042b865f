"""Convolutions over raw sound, with a log-softmax at the end.

Source: Dai et al., "Very deep convolutional neural networks for raw waveforms", ICASSP 2017, as in
PyTorch's tutorial on speech commands.
"""

from torch import Tensor, nn
from torch.nn import functional

from models import Cut, architecture

CONVERT = True


class Net(nn.Module):
    def __init__(self, channels: int, double: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(1, channels, 16, 4)
        self.bn1 = nn.BatchNorm1d(channels)
        self.pool1 = nn.MaxPool1d(2)
        self.conv2 = nn.Conv1d(channels, double, 3)
        self.bn2 = nn.BatchNorm1d(double)
        self.pool2 = nn.MaxPool1d(2)
        self.fc1 = nn.Linear(double, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool1(functional.relu(self.bn1(self.conv1(x))))
        x = self.pool2(functional.relu(self.bn2(self.conv2(x))))
        x = functional.avg_pool1d(x, x.shape[-1]).permute(0, 2, 1)
        return functional.log_softmax(self.fc1(x), dim=2).squeeze(1)


@architecture()
def m5_audio(cut: Cut, *, input_shape: tuple[int, ...] = (1, 96), classes: int = 4) -> nn.Module:
    """Build the model."""
    return Net(cut.width("first", 6), cut.width("second", 8), cut.classes(classes))
