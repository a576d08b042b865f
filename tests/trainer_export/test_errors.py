"""What a user reads when a model cannot be exported."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fleet_protocol.errors import ConfigError, ExportError
from tests.trainer_export.helpers import train_report
from trainer_export.recipe import Recipe
from trainer_export.trace import Signature

VECTOR = Signature((6,), "float32", 3)
IMAGE = Signature((2, 6, 6), "float32", 3)


class Inner(nn.Module):
    """A module in the middle of a model that does what exporters cannot."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sort(x, 1).values


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(x))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x if x.sum() > 0 else -x)


class FixedBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * torch.ones(int(x.shape[0]), 1))


def test_an_unsupported_operator_names_itself_its_module_and_a_way_out() -> None:
    """The message has the operator, the path and class of the module, and what to use instead."""
    module = nn.Sequential(nn.Linear(6, 6), Inner(), nn.Linear(6, 3))
    with pytest.raises(ExportError, match=r"module 1 \(Inner\): operator aten\.sort.* cannot be exported; use .*mask"):
        train_report(module, VECTOR)


@pytest.mark.parametrize(
    ("module", "signature", "message"),
    [
        (Dropping(), VECTOR, r"module drop \(Dropout\).*probability 0"),
        (
            nn.Sequential(nn.ConvTranspose2d(2, 3, 2), nn.Flatten(), nn.Linear(147, 3)),
            IMAGE,
            r"module 0 \(ConvTranspose2d\).*Upsample",
        ),
        (nn.Sequential(nn.AvgPool2d(3, 1), nn.Flatten(), nn.Linear(32, 3)), IMAGE, r"module 0 \(AvgPool2d\).*stride"),
        (nn.Sequential(nn.Linear(6, 3), nn.GELU("tanh")), VECTOR, r"module 1 \(GELU\).*exact"),
        (Branching(), VECTOR, "must not depend on the values"),
        (FixedBatch(), VECTOR, "one batch size only"),
        (nn.Linear(6, 4), VECTOR, r"must return logits \[batch, 3\], it returned"),
    ],
)
def test_models_that_cannot_be_exported(module: nn.Module, signature: Signature, message: str) -> None:
    """Each is refused with what is wrong and where."""
    with pytest.raises(ExportError, match=message):
        train_report(module, signature)


@pytest.mark.parametrize("numbers", [{"momentum": 1.0}, {"momentum": -0.1}, {"weight_decay": -1.0}, {"clip_norm": 0.0}])
def test_a_recipe_out_of_range_is_refused(numbers: dict[str, float]) -> None:
    """The message names the number."""
    with pytest.raises(ConfigError, match=next(iter(numbers))):
        Recipe(**numbers)
