"""Two layers of PyTorch's LSTM in both directions, with attention over the steps.

Source: Graves and Schmidhuber, "Framewise phoneme classification with bidirectional LSTM", Neural
Networks 18, 2005.
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture


class Net(nn.Module):
    """The layers, shares of the steps, and a classifier."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.LSTM(6, hidden, 2, batch_first=True, bidirectional=True)
        self.share = nn.Linear(2 * hidden, 1)
        self.head = nn.Linear(2 * hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        said, _ = self.layers(x)
        shares = torch.softmax(self.share(torch.tanh(said)), 1)
        out: Tensor = self.head((shares * said).sum(1))
        return out


@architecture()
def lstm_both_ways(
    cut: Cut, *, input_shape: tuple[int, ...] = (4, 6), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.width("hidden", 12), cut.classes(classes))
