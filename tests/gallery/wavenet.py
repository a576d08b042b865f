"""Dilated convolutions, one half of which gates the other, with residual and skip connections.

Source: van den Oord et al., "WaveNet", arXiv 1609.03499.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from models import Cut, architecture


class Net(nn.Module):
    def __init__(self, residual: int, gate: int, skip: int, classes: int) -> None:
        super().__init__()
        self.start = nn.Conv1d(2, residual, 1)
        self.dilated = nn.ModuleList(
            nn.Conv1d(residual, 2 * gate, 2, dilation=2**i) for i in range(2)
        )
        self.residuals = nn.ModuleList(nn.Conv1d(gate, residual, 1) for _ in range(2))
        self.skips = nn.ModuleList(nn.Conv1d(gate, skip, 1) for _ in range(2))
        self.end = nn.Conv1d(skip, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        total = 0
        for i, layer in enumerate(self.dilated):
            filtered, gated = layer(functional.pad(x, (2**i, 0))).chunk(2, dim=1)
            z = torch.tanh(filtered) * torch.sigmoid(gated)
            total = total + self.skips[i](z)
            x = x + self.residuals[i](z)
        out: Tensor = self.end(functional.relu(total)).transpose(1, 2)
        return out


@architecture()
def wavenet(cut: Cut, *, input_shape: tuple[int, ...] = (2, 8), classes: int = 4) -> nn.Module:
    """Build the model."""
    return Net(
        cut.width("residual", 6), cut.width("gate", 4), cut.width("skip", 5), cut.classes(classes)
    )
