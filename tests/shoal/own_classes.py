"""Models as their authors write them, one for each kind of layer that a conversion knows, and plain
ones.

Each class is built from sizes alone and takes images [batch, 1, 8, 8]; `CLASSES` has them by name.
As a file of ``--models`` it defines two architectures of each: ``<name>`` returns the class as it
is, ``<name>_converted`` what `convert` makes of it.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from models.architecture import Architecture, architecture
from models.cut import Cut
from models.zoo.conversion import convert
from models.zoo.layers import Scaler, StaticBatchNorm


class Flat(nn.Module):
    """Linear layers with a norm between them."""

    def __init__(self, hidden: int, classes: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(64, hidden)
        self.norm = norm(hidden)
        self.last = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x.flatten(1)))))


class Image(nn.Module):
    """A convolution of one to three dimensions with a norm, activations in place and dropout."""

    def __init__(
        self, hidden: int, classes: int, places: int, norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.shape = {1: (8, 8), 2: (1, 8, 8), 3: (1, 1, 8, 8)}[places]
        kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[places]
        window = {1: 3, 2: 3, 3: (1, 3, 3)}[places]
        dropout = {1: nn.Dropout1d, 2: nn.Dropout2d, 3: nn.Dropout3d}[places](0.05)
        self.body = nn.Sequential(
            kind(self.shape[0], hidden, window), norm(hidden), nn.ReLU(inplace=True), dropout
        )
        entries = {1: 6, 2: 36, 3: 36}[places]
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(hidden * entries, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.reshape(x.shape[0], *self.shape)))


class TwoNames(nn.Module):
    """A norm that has two names, and a matrix that has two."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.middle = nn.Linear(hidden, hidden)
        self.again = nn.Linear(hidden, hidden)
        self.again.weight = self.middle.weight
        self.alias = self.norm
        self.last = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.alias(self.first(x.flatten(1))))
        return self.last(torch.relu(self.again(torch.relu(self.middle(x)))))


class Buffers(nn.Module):
    """Buffers of several types that never change, one that no state has, and a norm that is
    frozen.
    """

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.norm.requires_grad_(requires_grad=False)
        self.last = nn.Linear(hidden, classes)
        self.register_buffer("shift", torch.linspace(0.0, 0.1, 64))
        self.register_buffer("kept", torch.arange(64) % 9 != 0)
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("gain", torch.tensor(1.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.where(self.kept, x.flatten(1) + self.shift, 0.0) * self.gain * self.steps
        return self.last(torch.relu(self.norm(self.first(x))))


class Attending(nn.Module):
    """PyTorch's encoder over the rows of an image, and batch norm behind it."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        layer = nn.TransformerEncoderLayer(8, 2, hidden, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.encoder(self.embed(x[:, 0])).mean(1)))


class Crossing(nn.Module):
    """Attention whose keys and values have sizes of their own."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, hidden)
        self.queries = nn.Parameter(torch.randn(2, 8))
        self.attention = nn.MultiheadAttention(8, 2, 0.1, kdim=hidden, vdim=8, batch_first=True)
        self.last = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, 0]
        queries = self.queries.expand(x.shape[0], 2, 8)
        return self.last(self.attention(queries, self.embed(rows), rows)[0].flatten(1))


class Recurrent(nn.Module):
    """Two layers with dropout between them, both ways, over the rows of an image."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, hidden, 2, batch_first=True, dropout=0.1, bidirectional=True)
        self.last = nn.Linear(2 * hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x[:, 0])[0].mean(1))


class Divided(nn.Module):
    """PyTorch's two kinds of weight norm, and spectral norm."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.old = nn.utils.weight_norm(nn.Linear(64, hidden))
        self.new = nn.utils.parametrizations.weight_norm(nn.Linear(hidden, hidden))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(hidden, hidden))
        self.last = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.new(torch.relu(self.old(x.flatten(1)))))
        return self.last(torch.relu(self.spectral(x)))


class Dropping(nn.Module):
    """Stochastic depth as people write it."""

    class DropPath(nn.Module):
        def __init__(self, drop_prob: float) -> None:
            super().__init__()
            self.drop_prob = drop_prob

        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                return x
            return x * (torch.rand(x.shape[0], 1) >= self.drop_prob) / (1 - self.drop_prob)

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, hidden)
        self.middle = nn.Linear(hidden, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.drop = self.DropPath(0.1)
        self.last = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x.flatten(1)))
        return self.last(torch.relu(x + self.drop(torch.relu(self.middle(x)))))


class TwoFaced(Flat):
    """Computes something else once its norm is another."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        return 2 * found if isinstance(self.norm, nn.BatchNorm1d) else found


class OfShoal(nn.Module):
    """Layers of Shoal's own, which is no conversion."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, hidden)
        self.scaler = Scaler(hidden / 12)
        self.norm = StaticBatchNorm(hidden)
        self.last = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.scaler(self.first(x.flatten(1))))))


CLASSES: dict[str, Callable[[int, int], nn.Module]] = {
    "bn1d": lambda hidden, classes: Flat(hidden, classes, nn.BatchNorm1d),
    "bn1d_places": lambda hidden, classes: Image(hidden, classes, 1, nn.BatchNorm1d),
    "bn2d": lambda hidden, classes: Image(hidden, classes, 2, nn.BatchNorm2d),
    "bn3d": lambda hidden, classes: Image(hidden, classes, 3, nn.BatchNorm3d),
    "bn_sync": lambda hidden, classes: Image(hidden, classes, 2, nn.SyncBatchNorm),
    "bn_cumulative": lambda hidden, classes: Flat(
        hidden, classes, lambda n: nn.BatchNorm1d(n, 1e-3, None)
    ),
    "bn_plain": lambda hidden, classes: Flat(
        hidden, classes, lambda n: nn.BatchNorm1d(n, affine=False)
    ),
    "two_names": TwoNames,
    "buffers": Buffers,
    "attending": Attending,
    "crossing": Crossing,
    "recurrent": Recurrent,
    "divided": Divided,
    "dropping": Dropping,
    "of_shoal": OfShoal,
    "instance_norm": lambda hidden, classes: Image(
        hidden, classes, 2, lambda n: nn.InstanceNorm2d(n, affine=True)
    ),
    "group_norm": lambda hidden, classes: Image(hidden, classes, 2, lambda n: nn.GroupNorm(n, n)),
    "layer_norm": lambda hidden, classes: Flat(hidden, classes, nn.LayerNorm),
    "no_norm": lambda hidden, classes: Flat(hidden, classes, lambda _: nn.Identity()),
    "untracked": lambda hidden, classes: Flat(
        hidden, classes, lambda n: nn.BatchNorm1d(n, track_running_stats=False)
    ),
    "two_faced": lambda hidden, classes: TwoFaced(hidden, classes, nn.BatchNorm1d),
}
FAITHFUL = [name for name in CLASSES if name not in {"untracked", "two_faced"}]
"""Classes that can have what a run finds."""


def _architecture(name: str, *, converts: bool) -> Architecture:
    def build(
        cut: Cut, *, input_shape: tuple[int, ...] = (1, 8, 8), classes: int = 10
    ) -> nn.Module:
        del input_shape
        module = CLASSES[name](cut.width("hidden", 12), cut.classes(classes))
        return convert(module)[0] if converts else module

    build.__name__ = f"{name}_converted" if converts else name
    return architecture()(build)


for _name in CLASSES:
    for _converts in (False, True):
        _made = _architecture(_name, converts=_converts)
        globals()[_made.name] = _made
