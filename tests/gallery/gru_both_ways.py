"""Two layers of PyTorch's GRU over words in both directions, with the last states concatenated.

Source: Cho et al., "Learning phrase representations using RNN encoder-decoder", EMNLP 2014; text
classifiers in many tutorials.
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture

CONVERT = True


class Net(nn.Module):
    def __init__(self, dim: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(15, dim, padding_idx=0)
        self.gru = nn.GRU(
            dim, hidden, num_layers=2, bidirectional=True, batch_first=True, dropout=0.2
        )
        self.fc = nn.Linear(hidden * 2, classes)
        self.dropout = nn.Dropout(0.3)

    def forward(self, text: Tensor) -> Tensor:
        _, hidden = self.gru(self.dropout(self.embedding(text)))
        hidden = self.dropout_of(torch.cat((hidden[-2, :, :], hidden[-1, :, :]), dim=1))
        out: Tensor = self.fc(hidden)
        return out

    def dropout_of(self, x: Tensor) -> Tensor:
        return x


@architecture(input_dtype="int64")
def gru_both_ways(cut: Cut, *, input_shape: tuple[int, ...] = (5,), classes: int = 4) -> nn.Module:
    """Build the model."""
    return Net(cut.width("embedding", 6), cut.width("hidden", 6), cut.classes(classes))
