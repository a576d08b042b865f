"""An LSTM over frames, with convolutions in place of matrix products.

Source: Shi et al., "Convolutional LSTM network", NeurIPS 2015.
"""

import torch
from torch import Tensor, nn

from models import Cut, architecture


class Net(nn.Module):
    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.hidden_dim = hidden
        self.conv = nn.Conv2d(2 + hidden, 4 * hidden, 3, padding=1)
        self.fc = nn.Linear(hidden, classes)

    def forward(self, frames: Tensor) -> Tensor:
        b, t, _, h, w = frames.shape
        state, cell = (
            torch.zeros(b, self.hidden_dim, h, w, device=frames.device) for _ in range(2)
        )
        for step in range(t):
            combined = self.conv(torch.cat([frames[:, step], state], dim=1))
            cc_i, cc_f, cc_o, cc_g = torch.split(combined, self.hidden_dim, dim=1)
            cell = torch.sigmoid(cc_f) * cell + torch.sigmoid(cc_i) * torch.tanh(cc_g)
            state = torch.sigmoid(cc_o) * torch.tanh(cell)
        out: Tensor = self.fc(state.mean((2, 3)))
        return out


@architecture()
def conv_lstm(
    cut: Cut, *, input_shape: tuple[int, ...] = (3, 2, 4, 4), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.width("hidden", 6), cut.classes(classes))
