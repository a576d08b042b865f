"""A gated recurrent unit written out, with its three gates one after another.

Source: Cho et al., "Learning phrase representations using RNN encoder-decoder", EMNLP 2014, ordered
as in torch.nn.GRU.
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture


class Net(nn.Module):
    """The cell over a short sequence, then a classifier."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(8, 3 * hidden)
        self.states = nn.Linear(hidden, 3 * hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0, :1] @ self.head.weight[:1])
        for step in range(x.shape[1]):
            reset, update, new = self.inputs(x[:, step]).chunk(3, -1)
            old_reset, old_update, old_new = self.states(state).chunk(3, -1)
            gate = torch.sigmoid(update + old_update)
            state = (1 - gate) * torch.tanh(
                new + torch.sigmoid(reset + old_reset) * old_new
            ) + gate * state
        out: Tensor = self.head(state)
        return out


@architecture()
def gru_by_hand(cut: Cut, *, input_shape: tuple[int, ...] = (4, 8), classes: int = 4) -> nn.Module:
    """Build the model."""
    return Net(cut.width("hidden", 12), cut.classes(classes))
