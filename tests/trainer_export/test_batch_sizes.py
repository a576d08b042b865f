"""Models that look at the size of their batch: both sides of a condition are compared."""

import pytest
import torch
from torch import Tensor, nn

from fleet_protocol.errors import ExportError
from tests.trainer_export.helpers import shaken, train_report
from trainer_export.model_inputs import Signature

SIGNATURE = Signature((6,), "int64", 3)


class Places(nn.Module):
    """Adds an embedding of places, which a batch of one needs no expansion for."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 8)
        self.places = nn.Embedding(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.tokens(x) + self.places(self.place_numbers(x))).mean(1))

    def place_numbers(self, x: Tensor) -> Tensor:
        numbers = torch.arange(x.shape[1])[None]
        if x.shape[0] != numbers.shape[0]:
            numbers = numbers.expand(x.shape[0], -1)
        return numbers


class Lengths(Places):
    """The same with the length of the tensor, which Python makes a number."""

    def place_numbers(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[1]).repeat(len(x), 1)


class Unlike(Places):
    """Computes something else for a batch of one."""

    def place_numbers(self, x: Tensor) -> Tensor:
        numbers = super().place_numbers(x)
        return numbers if x.shape[0] != 1 else numbers.flip(1) * 0


@pytest.mark.parametrize("kind", [Places, Lengths])
def test_sides_that_agree_are_exported(kind):
    torch.manual_seed(3)
    report = train_report(shaken(kind()), SIGNATURE, sizes=(4, 1, 3))
    assert report.worst_relative < 1e-4


def test_sides_that_do_not_agree_are_refused_with_the_line():
    with pytest.raises(
        ExportError, match=r"only for some batch sizes.*line \d+ of test_batch_sizes"
    ):
        train_report(Unlike(), SIGNATURE)


class Pooled(nn.Module):
    """Pools a map of tokens, whose channels a transposition brings to the front."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Linear(4, 8)
        self.pool = nn.AdaptiveAvgPool1d(1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.tokens(x).transpose(1, 2)).flatten(1))


def test_a_transposed_map_is_pooled_without_strides():
    torch.manual_seed(3)
    report = train_report(shaken(Pooled()), Signature((5, 4), "float32", 3), sizes=(4, 3))
    assert report.worst_relative < 1e-4
