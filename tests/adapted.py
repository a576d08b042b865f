"""A small model of digits whose first layers are frozen and have adapters, for tests."""

from itertools import pairwise

from torch import Tensor, nn

from models import Cut, architecture
from models.zoo.adapters import Adapters, with_adapters

__all__ = ["BASE", "adapted", "encoding", "half_frozen"]

BASE = ("1.weight", "1.bias", "3.weight", "3.bias")
"""The frozen tensors."""


@architecture()
def adapted(
    cut: Cut, *, input_shape: tuple[int, ...] = (1, 8, 8), classes: int = 10, hidden: int = 48
) -> nn.Module:
    """Build the model; the rank of its adapters, 8, is cut by width."""
    sizes = (64, hidden, hidden)
    layers = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
    layers.append(nn.Linear(hidden, cut.classes(classes)))
    chosen = Adapters(rank=8, alpha=16, targets=("1", "3"), trained=("5.*",))
    return with_adapters(nn.Sequential(nn.Flatten(), *layers), chosen, cut)


@architecture()
def half_frozen(
    cut: Cut,
    *,
    input_shape: tuple[int, ...] = (1, 8, 8),
    classes: int = 10,
    whole: bool = False,
    frozen: bool = True,
) -> nn.Module:
    """Build a network whose first layer is frozen, and cut unless it is `whole`."""
    first = cut.whole().width("first", 48) if whole else cut.width("first", 48)
    second = cut.width("second", 24)
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(64, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU()
    )
    net[1].requires_grad_(not frozen)
    return net.append(nn.Linear(second, cut.classes(classes)))


class _Encoding(nn.Module):
    """One of PyTorch's encoder layers over a row of vectors."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x).mean(1))
        return out


@architecture()
def encoding(cut: Cut, *, input_shape: tuple[int, ...] = (5, 8), classes: int = 4) -> nn.Module:
    """Build the model; its adapters are beside the first layer after the attention."""
    chosen = Adapters(rank=4, alpha=8, targets=("layer.linear1",), trained=("head.*",))
    return with_adapters(_Encoding(input_shape[1], cut.classes(classes)), chosen, cut)
