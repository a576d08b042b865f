"""Layouts of models of large pictures are proved on small ones, too, which are cheaper; the whole
model is proved on pictures of their own size.
"""

import pytest
import torch
from torch import nn

from fleet_protocol.errors import ConfigError
from models import architecture, infer_layout
from models.architecture import Architecture
from models.cut import Cut

SIDE = 160
SMALLEST = 75


class Pictures(nn.Module):
    """Notes the sizes of the pictures that it gets."""

    def __init__(self, hidden: int, classes: int, sides: list[int]) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 2 * hidden, 8, stride=8)
        self.head = nn.Linear(2 * hidden, classes)
        self.sides = sides

    def maps(self, x: torch.Tensor) -> torch.Tensor:
        self.sides.append(x.shape[-1])
        maps: torch.Tensor = self.convolution(x).tanh()
        return maps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.maps(x).mean((2, 3)))
        return logits


class NotSmallest(Pictures):
    """Refuses pictures that its layers would make too small, as Inception v3 does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] < SMALLEST:
            raise ValueError(f"pictures have {SMALLEST} pixels or more")
        return super().forward(x)


class OneSize(Pictures):
    """Refuses pictures of another size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != SIDE:
            raise ValueError(f"pictures have {SIDE} pixels")
        return super().forward(x)


class LargeOnly(Pictures):
    """Scales the maps of large pictures by their place, so its units are not interchangeable."""

    def maps(self, x: torch.Tensor) -> torch.Tensor:
        maps = super().maps(x)
        if x.shape[-1] > SIDE - 1:
            maps = maps * torch.linspace(0.5, 1.5, maps.shape[1])[:, None, None]
        return maps


def _architecture(kind: type[Pictures], sides: list[int]) -> Architecture:
    @architecture()
    def pictures(
        cut: Cut, *, input_shape: tuple[int, ...] = (3, SIDE, SIDE), classes: int = 3
    ) -> nn.Module:
        return kind(cut.width("hidden", 8), cut.classes(classes), sides)

    return pictures


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(Pictures, {64, SIDE}), (NotSmallest, {128, SIDE}), (OneSize, {SIDE})],
)
def test_variants_have_small_pictures_if_the_model_runs_on_them(
    kind: type[Pictures], expected: set[int]
) -> None:
    """The whole model, which is run first, gets pictures of their own size."""
    sides: list[int] = []
    layout = infer_layout(_architecture(kind, sides))
    assert layout.shapes(layout.tier(0.5))["convolution.weight"] == (8, 3, 8, 8)
    assert set(sides) == expected
    assert sides[0] == SIDE


def test_a_model_that_differs_on_large_pictures_only_is_refused() -> None:
    with pytest.raises(ConfigError, match="units of axis hidden"):
        infer_layout(_architecture(LargeOnly, []))
