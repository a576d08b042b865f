"""Units must be interchangeable on values, too, that few samples have: large activations, shifted
images, padding.
"""

import pytest
import torch
from torch import nn

from fleet_protocol.errors import ConfigError
from models import architecture, infer_layout
from tests.marking import mostly_slow


def arch_of(kind, shape, dtype="float32"):
    @architecture(input_dtype=dtype)
    def custom(cut, *, input_shape=shape, classes=3):
        return kind(cut.width("hidden", 8), cut.classes(classes))

    return custom


class Layered(nn.Module):
    def __init__(self, hidden, classes):
        super().__init__()
        self.first = nn.Linear(4, hidden)
        self.last = nn.Linear(hidden, classes)

    def placed(self, y):
        return y * torch.linspace(0.5, 1.5, y.shape[-1])


class Large(Layered):
    """Scales large activations by their place; only what is twice as precise knows that it does."""

    def forward(self, x):
        y = torch.relu(self.first(x))
        return self.last(torch.where(y > 6, self.placed(y), y))


class LargeSingle(Layered):
    """The same in a model that computes in one precision whatever it is given."""

    def forward(self, x):
        y = torch.relu(nn.functional.linear(x.float(), self.first.weight.float()))
        y = torch.where(y > 6, self.placed(y), y) @ torch.eye(8)
        return self.last(y)


class LargeNormed(nn.Module):
    """Reached by no size of samples, but by larger parameters."""

    def __init__(self, hidden, classes):
        super().__init__()
        self.table = nn.Embedding(50, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.last = nn.Linear(hidden, classes)

    def forward(self, x):
        y = self.norm(self.table(x)).mean(1)
        return self.last(torch.where(y > 4, y.flip(1), y))


class Padded(nn.Module):
    """Treats the first of many tokens in another way."""

    def __init__(self, hidden, classes):
        super().__init__()
        self.table = nn.Embedding(5000, hidden)
        self.last = nn.Linear(hidden, classes)

    def forward(self, x):
        y = self.table(x)
        return self.last(torch.where((x == 0)[..., None], y.flip(2), y).mean(1))


class Special(Padded):
    """Treats one token of many in another way, wherever it lies in the vocabulary."""

    def special(self, x):
        return x == 1234

    def forward(self, x):
        y = self.table(x)
        return self.last(torch.where(self.special(x)[..., None], y.flip(2), y).mean(1))


class Listed(Special):
    def special(self, x):
        return torch.isin(x, torch.tensor([2000, 2001]))


class Flagged(Special):
    """Known from a table."""

    def __init__(self, hidden, classes):
        super().__init__(hidden, classes)
        self.register_buffer("flags", torch.arange(5000) == 4321)

    def special(self, x):
        return self.flags[x]


class Reserved(Special):
    """The last ten."""

    def special(self, x):
        return x >= 4990


class Missing(Layered):
    """A number that stands for none."""

    def forward(self, x):
        y = self.first(x)
        return self.last(torch.where((x == -1).any(1, keepdim=True), self.placed(y), y))


@pytest.mark.parametrize(
    "kind",
    mostly_slow(
        [Large, LargeSingle, LargeNormed, Padded, Special, Listed, Flagged, Reserved, Missing],
        lambda kind: kind not in (Listed, Reserved, Large, LargeNormed),
    ),
)
def test_units_that_have_places_on_rare_values_alone(kind):
    """They would be sliced wrongly as soon as such a value comes."""
    is_layered = issubclass(kind, Layered)
    arch = arch_of(kind, (4,)) if is_layered else arch_of(kind, (6,), "int64")
    with pytest.raises(
        ConfigError,
        match=r"axis hidden are not interch.*module last \(Linear\), for rare numbers",
    ):
        infer_layout(arch)


class Neighbours(nn.Module):
    """AlexNet's norm over channels and their neighbours, which hardly does anything to small
    activations.
    """

    def __init__(self, hidden, classes):
        super().__init__()
        self.first = nn.Conv2d(1, hidden, 3)
        self.norm = nn.LocalResponseNorm(3)
        self.last = nn.Linear(hidden, classes)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).mean((2, 3)))


def test_a_norm_over_neighbours_is_refused():
    """Who takes the leading channels all the same may say so."""
    with pytest.raises(
        ConfigError,
        match=r"by \d\.\d+%.*norm \(LocalResponseNorm\), for rare numbers .*leading=True",
    ):
        infer_layout(arch_of(Neighbours, (1, 6, 6)))

    @architecture()
    def leading(cut, *, input_shape=(1, 6, 6), classes=3):
        return Neighbours(cut.width("hidden", 8, leading=True), cut.classes(classes))

    assert infer_layout(leading).axes["hidden"].leading


class Waves(Layered):
    """Of large numbers: the last bit of what goes into the sine decides on the third of what comes
    out.
    """

    def forward(self, x):
        return torch.sin(300 * self.last(self.first(x)))


class Overflowing(Layered):
    def forward(self, x):
        return self.last(self.first(x).exp().exp())


@pytest.mark.parametrize("kind", [Waves, Overflowing])
def test_waves_and_overflow_are_no_doubt(kind):
    """No rounding error of large numbers looks like a place, and what overflows there proves
    nothing.
    """
    assert infer_layout(arch_of(kind, (4,))).axes["hidden"].size == 8
