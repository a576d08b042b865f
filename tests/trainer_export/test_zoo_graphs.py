"""Every graph of every zoo model against PyTorch."""

import pytest

from tests.marking import mostly_slow
from tests.trainer_export.helpers import (
    all_reports,
    assert_portable,
    batches_for,
    graphs_of,
    tiny,
    train_report,
)
from trainer_export.check import calm_torch
from trainer_export.formats.onnx import write_train_graph
from trainer_export.optimizers.sgd import Sgd
from trainer_export.recipe import Recipe
from trainer_export.train_check import check_train

TIERS = [
    ("mlp", 1.0, None),
    ("mlp", 0.25, None),
    ("lenet5", 1.0, None),
    ("lenet5", 0.5, None),
    ("conv", 1.0, None),
    ("conv", 0.5, None),
    ("conv", 0.125, None),
    ("text_encoder", 1.0, 2),
    ("text_encoder", 0.5, 1),
]


@pytest.mark.parametrize(
    ("name", "width", "depth"), mostly_slow(TIERS, lambda tier: 0.25 <= tier[1] < 1 and not tier[2])
)
def test_graphs_agree_with_pytorch(name: str, width: float, depth: int | None) -> None:
    """Train, eval, statistics and infer graphs agree within 1e-5 for batches of 5, 1 and 8
    samples.
    """
    module, signature = tiny(name, width, depth)
    reports = all_reports(module, signature, graphs=graphs_of(name, width, depth))
    expected = {"onnx/train", "onnx/eval", "onnx/infer"} | (
        {"onnx/stats"} if name == "conv" else set()
    )
    assert set(reports) == expected
    assert max(report.worst_absolute for report in reports.values()) <= 1e-5
    assert reports["onnx/train"].steps >= 5
    assert set(reports["onnx/train"].batch_sizes) == {5, 1, 8}


@pytest.mark.slow
def test_graphs_hold_standard_operators_only() -> None:
    """Opset 18, IR 9, default domain, dynamic batch, nothing in external files."""
    for tier in (("conv", 0.5, None), ("text_encoder", 0.5, 1)):
        for graph in graphs_of(*tier):
            assert_portable(graph.model)
            x = next(value for value in graph.model.graph.input if value.name == "x")
            assert x.type.tensor_type.shape.dim[0].dim_param == "batch"


@pytest.mark.parametrize(
    "recipe",
    mostly_slow(
        [
            Recipe(Sgd(momentum=0.0, weight_decay=0.0), clip_norm=None),
            Recipe(Sgd(momentum=0.0, weight_decay=0.01), clip_norm=0.1),
            Recipe(Sgd(momentum=0.9, weight_decay=0.0), clip_norm=None),
            Recipe(Sgd(momentum=0.5, weight_decay=0.1), clip_norm=1e3),
        ],
        lambda recipe: recipe.clip_norm is None and not recipe.optimizer.states,
    ),
)
def test_recipe_parts_are_optional(recipe: Recipe) -> None:
    """Momentum, weight decay and clipping can each be left out; without momentum the graph has no
    states.
    """
    module, signature = tiny("conv", 0.5)
    report = train_report(module, signature, recipe)
    assert report.worst_absolute <= 1e-5
    graph = write_train_graph(module, signature, recipe)
    states = [port.name for port in graph.inputs if port.name.startswith("state.")]
    assert bool(states) == bool(recipe.optimizer.states)


@pytest.mark.slow
def test_clipping_bites() -> None:
    """A bound far below the gradient's norm changes the step, so the comparison above covers
    clipping.
    """
    module, signature = tiny("mlp")
    loose = write_train_graph(module, signature, Recipe(clip_norm=None))
    tight = Recipe(clip_norm=1e-3)
    with calm_torch(), pytest.raises(Exception, match="differs from PyTorch"):
        check_train(loose.data, module, tight, batches_for(module, signature))


@pytest.mark.slow
def test_a_full_width_model_has_no_scaler_in_its_graph() -> None:
    """At width 1 the Scaler divides by one, which is no operator at all."""
    full = write_train_graph(*tiny("mlp", 1.0), Recipe()).model
    half = write_train_graph(*tiny("mlp", 0.5), Recipe()).model
    count = {id(m): sum(node.op_type == "Div" for node in m.graph.node) for m in (full, half)}
    assert count[id(half)] > count[id(full)]
