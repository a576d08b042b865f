"""An autoencoder whose decoder uses the transposed weights of the encoder.

Source: Vincent et al., "Stacked denoising autoencoders", JMLR 11, 2010.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from models import Cut, architecture


class Net(nn.Module):
    def __init__(self, outputs: int, hidden: int, code: int) -> None:
        super().__init__()
        self.first = nn.Linear(outputs, hidden)
        self.second = nn.Linear(hidden, code)
        self.back = nn.Parameter(torch.zeros(hidden))
        self.out = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        code = torch.sigmoid(self.second(torch.sigmoid(self.first(x))))
        back = torch.sigmoid(functional.linear(code, self.second.weight.t(), self.back))
        return functional.linear(back, self.first.weight.t(), self.out)


@architecture()
def tied_autoencoder(
    cut: Cut, *, input_shape: tuple[int, ...] = (9,), classes: int = 9
) -> nn.Module:
    """Build the model."""
    return Net(cut.classes(classes), cut.width("hidden", 8), cut.width("code", 4))
