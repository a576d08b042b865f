"""The multi-layer perceptron of specification 5.6 (arXiv:2006.16765)."""

import math

from torch import Tensor, nn

from models.architecture import architecture
from models.cut import Cut
from models.zoo.layers import Scaler, zero_linear_biases


class Mlp(nn.Module):
    """Linear layers with ReLU and a Scaler between them."""

    def __init__(self, inputs: int, hidden: tuple[int, ...], classes: int, rate: float) -> None:
        super().__init__()
        self.hidden = nn.ModuleList()
        for outputs in hidden:
            self.hidden.append(nn.Linear(inputs, outputs))
            inputs = outputs
        self.scaler = Scaler(rate)
        self.head = nn.Linear(inputs, classes)
        zero_linear_biases(self)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits, float32 [batch, classes], of x, float32 [batch, ...]."""
        x = x.flatten(1)
        for layer in self.hidden:
            x = self.scaler(layer(x)).relu()
        logits: Tensor = self.head(x)
        return logits


@architecture(paper="arXiv:2006.16765 (network of the MNIST experiments)")
def mlp(
    cut: Cut,
    *,
    input_shape: tuple[int, ...] = (1, 28, 28),
    classes: int = 10,
    hidden: tuple[int, ...] = (200, 200),
    scaler: bool = True,
) -> Mlp:
    """Build a perceptron whose hidden layers are cut by width."""
    return Mlp(
        math.prod(input_shape),
        cut.widths("hidden", hidden),
        cut.classes(classes),
        cut.rate if scaler else 1.0,
    )
