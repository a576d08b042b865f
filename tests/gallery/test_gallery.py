"""Every model of the gallery is sliced as its code lays it out, or refused with a remedy."""

from collections.abc import Iterator
from functools import cache
from typing import cast

import numpy as np
import pytest
import torch
from torch import nn

from fleet_protocol.errors import ConfigError, PlanError
from models import Architecture, Layout, build, infer_layout, make_plan, slice_weights
from models.zoo.conversion_plan import converted
from tests.gallery import GALLERY, Model
from tests.gallery.table import PAGE
from tests.models.layouts import scatter
from tests.trainer_export.helpers import shaken, train_report
from trainer_export.check import calm_torch
from trainer_export.model_inputs import Signature, heads_of

SLICED = [pytest.param(model, id=name) for name, model in GALLERY.items() if not model.refused]
REFUSED = [pytest.param(model, id=name) for name, model in GALLERY.items() if model.refused]


@pytest.fixture(autouse=True, scope="module")
def calm() -> Iterator[None]:
    """On one thread, since for tiny models more of them cost more than they bring."""
    with calm_torch():
        yield


@cache
def _layout(name: str) -> Layout:
    return infer_layout(GALLERY[name].arch)


def layout_of(arch: Architecture) -> Layout:
    """Inferred once for all tests."""
    return _layout(arch.name)


def weights_of(layout: Layout) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(4)
    return {item.name: generator.standard_normal(item.shape) * 0.4 for item in layout.parameters}


def computed(
    arch: Architecture, width: float, weights: dict[str, np.ndarray], x: torch.Tensor
) -> torch.Tensor:
    """Outputs of a model of some width in double precision, and the gradient of their squares' sum
    in the inputs.
    """
    module: nn.Module = build(arch, width).double().eval()
    module.load_state_dict(
        {name: torch.from_numpy(value) for name, value in weights.items()}, strict=False
    )
    given = x.clone().requires_grad_(x.is_floating_point())
    outputs = torch.cat([head.flatten() for head in heads_of(module(given)).values()])
    gradients = torch.autograd.grad(outputs.square().sum(), [given]) if given.requires_grad else ()
    return torch.cat([outputs, *(gradient.flatten() for gradient in gradients)])


def inputs(layout: Layout) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (3, *layout.input_shape)
    if layout.input_dtype == "int64":
        return torch.randint(0, 11, shape, generator=generator)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    row = GALLERY[layout.arch].arch.row(layout.settings)
    return cast("torch.Tensor", row.with_tokens(drawn, 7) if row.named else drawn)


@pytest.mark.parametrize("model", SLICED)
def test_a_tier_has_the_shapes_of_its_layout(model: Model) -> None:
    """The layout foresees what the builder builds at every width."""
    layout = layout_of(model.arch)
    assert Layout.from_json(layout.to_json()) == layout
    for width in (0.25, 0.4, 0.5, 0.7, 1.0):
        built = build(model.arch, width)
        shapes = {name: tuple(value.shape) for name, value in built.named_parameters()}
        assert shapes == layout.shapes(layout.tier(width))


@pytest.mark.parametrize("kind", ["static", "rolling", "random"])
@pytest.mark.parametrize("model", [case for case in SLICED if case.values[0].alone])
def test_a_sub_model_is_the_whole_with_the_other_units_zero(model: Model, kind: str) -> None:
    """Whatever the order of the entries: a slice computes what the whole computes with zeros for
    what it lacks.
    """
    layout = layout_of(model.arch)
    weights = weights_of(layout)
    x = inputs(layout)
    for width in (0.25, 0.5, 0.7):
        plan = make_plan(layout, layout.tier(width), kind, round_index=3, seed=2)
        cut = slice_weights(layout, plan, weights)
        zeroed = scatter(
            layout, plan, cut, {name: np.zeros_like(value) for name, value in weights.items()}
        )
        torch.testing.assert_close(
            computed(model.arch, width, cut, x), computed(model.arch, 1.0, zeroed, x)
        )


@pytest.mark.parametrize("kind", ["rolling", "static"])
@pytest.mark.parametrize("model", SLICED)
def test_units_in_another_order_are_the_same_model(model: Model, kind: str) -> None:
    """A window over the whole axis only changes places, so outputs and gradients stay, norms or
    not.
    """
    layout = layout_of(model.arch)
    weights = weights_of(layout)
    x = inputs(layout)
    if any(axis.leading for axis in layout.axes.values()) and kind != "static":
        with pytest.raises(PlanError, match="was declared leading"):
            make_plan(layout, layout.tier(1.0), kind)
        return
    turned = slice_weights(
        layout, make_plan(layout, layout.tier(1.0), kind, round_index=3), weights
    )
    moved = [name for name, value in turned.items() if not np.array_equal(value, weights[name])]
    assert bool(moved) == (kind == "rolling")
    torch.testing.assert_close(
        computed(model.arch, 1.0, turned, x), computed(model.arch, 1.0, weights, x)
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", SLICED)
def test_half_of_it_trains_in_a_graph(model: Model) -> None:
    """As in PyTorch, over two steps; with `--convert`, which leaves alone what needs none."""
    layout = layout_of(model.arch)
    arch = converted(model.arch)
    torch.manual_seed(3)
    module = shaken(build(arch, 0.5))
    row = arch.row(layout.settings)
    signature = Signature(row.shape, row.dtype, layout.classes, row=row).with_places_of(module)
    assert train_report(module, signature, model.recipe, sizes=(3, 2)).worst_absolute <= 1e-5


@pytest.mark.parametrize("model", REFUSED)
def test_what_cannot_be_cut_is_refused(model: Model) -> None:
    """The message names axis, tensor, module and what to do."""
    with pytest.raises(ConfigError, match=model.refused):
        infer_layout(model.arch)


def test_the_page_of_models_lists_them_all() -> None:
    """A new file is a new row: python -m tests.gallery.table."""
    _, _, table = PAGE.read_text().partition("\n| Model |")
    rows = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert rows == [*GALLERY]


def test_the_gallery_names_its_sources() -> None:
    """Each file says what it shows and where it comes from."""
    assert len(GALLERY) - len(REFUSED) >= 42
    assert all(
        model.kind.endswith(".") and model.source.endswith(".") for model in GALLERY.values()
    )
