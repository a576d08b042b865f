"""What a refusal of an axis advises: it was tried, and a residual gets one name for both."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleet_protocol.errors import ConfigError
from models import Architecture, Cut, architecture, infer_layout
from models.axes import Axis
from models.zoo.builds import ModelBuilder
from models.zoo.remedies import Trials


class Added(nn.Module):
    """Two layers whose outputs are added, so that their sizes must be equal."""

    def __init__(self, first: int, second: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, first)
        self.second = nn.Linear(4, second)
        self.head = nn.Linear(second, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head((self.first(x) + self.second(x)).tanh())
        return logits


@architecture()
def added(cut: Cut, *, input_shape: tuple[int, ...] = (4,), classes: int = 3) -> nn.Module:
    return Added(cut.width("a", 6), cut.width("b", 6), cut.classes(classes))


def rounded(size: int) -> int:
    """Return the nearest multiple of 8, as packages round numbers of channels."""
    return (size + 4) // 8 * 8


@architecture()
def rounding(cut: Cut, *, input_shape: tuple[int, ...] = (4,), classes: int = 3) -> nn.Module:
    size = rounded(cut.width("a", 32))
    return nn.Sequential(nn.Linear(4, size), nn.Tanh(), nn.Linear(size, cut.classes(classes)))


@architecture()
def grouping(cut: Cut, *, input_shape: tuple[int, ...] = (4,), classes: int = 3) -> nn.Module:
    size = rounded(cut.groups("a", 4) * 8)
    return nn.Sequential(nn.Linear(4, size), nn.Tanh(), nn.Linear(size, cut.classes(classes)))


def refusal(arch: Architecture) -> str:
    with pytest.raises(ConfigError) as refused:
        infer_layout(arch)
    return str(refused.value)


def test_two_axes_that_a_residual_adds_get_one_name() -> None:
    """And no advice about units with fixed places, which would cut one of them wrongly."""
    message = refusal(added)
    assert "name all of them 'a'" in message
    assert "leading=True" not in message


def test_a_size_that_is_rounded_is_cut_in_multiples() -> None:
    """The advice does what it promises."""
    assert "request cut.groups('a', 4) * 8" in refusal(rounding)
    assert infer_layout(grouping).axes["a"].size == 4


def test_no_remedy_is_tried_beyond_its_time() -> None:
    """What was not tried is not named."""
    tried: list[Any] = []

    def accepted(builder: ModelBuilder) -> bool:
        tried.append(builder)
        return True

    builder = ModelBuilder(added)
    first = Axis("a", 6)
    assert not Trials(builder, accepted, deadline=0.0).accepts(first)
    assert not tried
    trials = Trials(builder, accepted)
    assert trials.accepts_joined([Axis("b", 6)], first)
    # Each trial ends with the time for all.
    assert [changed.until for changed in tried] == [trials.deadline]


class Skipping(nn.Module):
    """A layer that is sometimes left out in training."""

    def __init__(self, size: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, size)
        self.second = nn.Linear(size, size)
        self.head = nn.Linear(size, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        left_out = self.training and bool(torch.rand([]) < 0.3)
        if not left_out:
            x = x + self.second(x).tanh()
        logits: Tensor = self.head(x)
        return logits


@architecture()
def skipping(cut: Cut, *, input_shape: tuple[int, ...] = (4,), classes: int = 3) -> nn.Module:
    return Skipping(cut.width("a", 6), cut.classes(classes))


def test_a_layer_that_is_left_out_at_random_says_nothing_about_units() -> None:
    """It may run in two trials and not in a third."""
    for seed in range(6):
        torch.manual_seed(seed)
        assert infer_layout(skipping).axes["a"].size == 6
