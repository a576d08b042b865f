"""What a refusal of the gallery advises is done, and holds."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fleet_protocol.errors import ConfigError
from models import Architecture, Cut, build, infer_layout
from models.axes import Axis
from models.zoo.conversion_plan import converted
from tests.gallery import GALLERY
from tests.trainer_export.helpers import shaken, train_report
from trainer_export.check import calm_torch
from trainer_export.model_inputs import Signature

REFUSED = [name for name, model in GALLERY.items() if model.refused]


@pytest.fixture(autouse=True, scope="module")
def calm() -> Iterator[None]:
    with calm_torch():
        yield


def declared(arch: Architecture, axis: Axis) -> Architecture:
    """The architecture with an axis declared as its author would after reading the refusal."""

    def builder(cut: Cut, **settings: Any) -> Any:
        cut.declare(axis)
        return arch.build(cut, **settings)

    return replace(converted(arch), build=builder)


def advised(arch: Architecture) -> list[Axis]:
    """The forms of the axis that the message names."""
    with pytest.raises(ConfigError) as refused:
        infer_layout(arch)
    message = str(refused.value)
    cut = Cut()
    arch.build(cut, **arch.settings())
    axis = next(item for name, item in cut.axes.items() if f"axis {name} " in message)
    found = [replace(axis, leading=True)] if "leading=True" in message else []
    for kind, number in re.findall(r"cut\.(heads|groups)\('\w+', (\d+)", message):
        if axis.groups == 1:
            found.append(
                replace(axis, groups=int(number))
                if kind == "heads"
                else Axis(axis.name, int(number))
            )
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_advised_is_cut(name: str) -> None:
    """Each form that is named has a layout."""
    arch = GALLERY[name].arch
    forms = advised(arch)
    assert forms
    for axis in forms:
        assert infer_layout(declared(arch, axis)).axes[axis.name] == axis


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_advised_trains_in_a_graph(name: str) -> None:
    """And is exported."""
    arch = GALLERY[name].arch
    for axis in advised(arch):
        torch.manual_seed(3)
        layout = infer_layout(declared(arch, axis))
        module = shaken(build(declared(arch, axis), 0.5))
        signature = Signature(
            layout.input_shape, layout.input_dtype, layout.classes
        ).with_places_of(module)
        assert train_report(module, signature, sizes=(3, 2)).worst_absolute <= 1e-5


def test_whole_groups_of_heads_are_cut() -> None:
    """Advised where heads were cut inside."""
    with pytest.raises(ConfigError, match=r"cut\.groups\('attention', 4\) \* 8"):
        infer_layout(GALLERY["rotary_thin_heads"].arch)
    assert infer_layout(GALLERY["rotary_whole_heads"].arch).axes["head"].size == 4
