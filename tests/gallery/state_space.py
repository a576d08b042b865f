"""A layer of diagonal state spaces, written as a convolution over time.

Source: Gu et al., "On the parameterization and initialization of diagonal state space models",
NeurIPS 2022.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from models import Cut, architecture

LENGTH = 8


class Net(nn.Module):
    """Four decaying states for each channel."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.enter = nn.Linear(3, channels)
        self.head = nn.Linear(channels, classes)
        self.decay = nn.Parameter(torch.rand(channels, 4))
        self.taken = nn.Parameter(torch.randn(channels, 4))
        self.past = nn.Parameter(torch.randn(channels))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x).transpose(1, 2)
        powers = torch.exp(-self.decay.abs().unsqueeze(-1) * torch.arange(LENGTH))
        kernel = torch.einsum("cn,cnl->cl", self.taken, powers).flip(-1).unsqueeze(1)
        seen = functional.conv1d(functional.pad(x, (LENGTH - 1, 0)), kernel, groups=kernel.shape[0])
        out: Tensor = self.head(functional.gelu(seen + self.past.unsqueeze(-1) * x).mean(-1))
        return out


@architecture()
def state_space(
    cut: Cut, *, input_shape: tuple[int, ...] = (LENGTH, 3), classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.width("channels", 8), cut.classes(classes))
