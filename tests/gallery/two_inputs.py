"""Two inputs: crossed features and the features of a network, with one classifier over both.

Source: Cheng et al., "Wide and deep learning for recommender systems", DLRS 2016.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from models import Cut, architecture

SHAPES: Mapping[str, tuple[int, ...]] = {"crossed": (6,), "pixels": (1, 4, 4)}


class Net(nn.Module):
    """A wide and a deep part."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.deep = nn.Linear(16, hidden)
        self.head = nn.Linear(6 + hidden, classes)

    def forward(self, crossed: Tensor, pixels: Tensor) -> Tensor:
        out: Tensor = self.head(torch.cat([crossed, self.deep(pixels.flatten(1)).relu()], 1))
        return out


@architecture()
def two_inputs(
    cut: Cut, *, input_shape: Mapping[str, tuple[int, ...]] = SHAPES, classes: int = 4
) -> nn.Module:
    """Build the model."""
    return Net(cut.width("hidden", 12), cut.classes(classes))
