"""The comparison with PyTorch finds what is wrong and names it."""

import functools
from dataclasses import replace
from unittest import mock

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from fleet_protocol.errors import ExportError
from fleet_protocol.manifest import CheckSpec
from models import build
from tests.trainer_export.helpers import ZOO, batches_for, graphs_of, tiny
from trainer_export import train_check
from trainer_export.batches import SizedBatches
from trainer_export.check import LIMIT, WorstDeviation, calm_torch
from trainer_export.formats.onnx import write_train_graph
from trainer_export.model_inputs import Signature, model_noise
from trainer_export.optimizers.sgd import Sgd
from trainer_export.recipe import Recipe
from trainer_export.repeated_check import DoubleRun, Run, repeated
from trainer_export.routines.evaluate import check_eval
from trainer_export.routines.statistics import check_statistics
from trainer_export.train_check import check_train


def tampered(data: bytes, old: float, new: float) -> bytes:
    """The graph with one number changed where it stands as a constant."""
    model = onnx.load_model_from_string(data)
    hits = [
        t
        for t in model.graph.initializer
        if not t.dims and np.isclose(numpy_helper.to_array(t), old)
    ]
    assert len(hits) == 1
    hits[0].CopyFrom(numpy_helper.from_array(np.array(new, np.float32), hits[0].name))
    return model.SerializeToString()


def rewired(data: bytes, first: str, second: str) -> bytes:
    """The graph with the producers of two outputs exchanged."""
    model = onnx.load_model_from_string(data)
    swap = {first: second, second: first}
    for node in model.graph.node:
        node.output[:] = [swap.get(name, name) for name in node.output]
    return model.SerializeToString()


def test_a_wrong_momentum_is_found_and_named() -> None:
    """A graph with another momentum deviates in its states; the message names one and says nothing
    is published.
    """
    module, signature = tiny("mlp")
    graph = write_train_graph(module, signature, Recipe(Sgd(momentum=0.875)))
    with (
        calm_torch(),
        pytest.raises(ExportError, match=r"onnx/train differs.*state\.\S+ deviates by"),
    ):
        check_train(
            tampered(graph.data, 0.875, 0.5),
            module,
            Recipe(Sgd(momentum=0.875)),
            batches_for(module, signature),
        )


def test_a_fault_is_refused_after_one_step_of_each_batch() -> None:
    """Further steps cost a large model minutes, and could not make it right."""
    module, signature = tiny("mlp")
    recipe = Recipe(Sgd(momentum=0.5, weight_decay=0.25), clip_norm=None)
    graph = tampered(write_train_graph(module, signature, recipe).data, 0.25, 0.75)
    taken = mock.Mock(wraps=train_check.run_session)
    with (
        calm_torch(),
        mock.patch.object(train_check, "run_session", taken),
        pytest.raises(ExportError, match="differs from PyTorch"),
    ):
        check_train(graph, module, recipe, batches_for(module, signature))
    assert taken.call_count == 10  # five batches in float32, and five judged by float64


def test_a_small_fault_is_found() -> None:
    """One in a thousand of the weight decay is more than the limit allows to hide in the states."""
    module, signature = tiny("mlp")
    recipe = Recipe(Sgd(momentum=0.5, weight_decay=0.25), clip_norm=None)
    graph = write_train_graph(module, signature, recipe)
    with calm_torch(), pytest.raises(ExportError, match="differs from PyTorch"):
        check_train(
            tampered(graph.data, 0.25, 0.2505), module, recipe, batches_for(module, signature)
        )


def test_exchanged_outputs_are_found() -> None:
    """Two gradients of equal shape in each other's place do not pass."""
    module, signature = tiny("conv")
    recipe = Recipe(clip_norm=None)
    graph = write_train_graph(module, signature, recipe)
    wrong = rewired(graph.data, "next.state.units.2.norm.weight", "next.state.units.2.norm.bias")
    with calm_torch(), pytest.raises(ExportError, match=r"state\.units\.2\.norm"):
        check_train(wrong, module, recipe, batches_for(module, signature))


def test_swapped_statistics_are_found() -> None:
    """Mean and variance of a norm are told apart, in the graph that makes them and in those that
    take them.
    """
    module, signature = tiny("conv")
    graphs = {g.key: g for g in graphs_of("conv")}
    names = "stat.units.0.norm.mean", "stat.units.0.norm.var"
    with calm_torch(), pytest.raises(ExportError, match=r"onnx/stats.*stat\.units\.0\.norm"):
        check_statistics(
            rewired(graphs["onnx/stats"].data, *names),
            module,
            Recipe(),
            batches_for(module, signature),
        )
    model = onnx.load_model_from_string(graphs["onnx/eval"].data)
    for node in model.graph.node:
        swap = dict(zip(names, names[::-1], strict=True))
        node.input[:] = [swap.get(name, name) for name in node.input]
    with calm_torch(), pytest.raises(ExportError, match="onnx/eval"):
        check_eval(model.SerializeToString(), module, Recipe(), batches_for(module, signature))


@pytest.mark.slow
def test_not_a_number_is_a_deviation() -> None:
    """A graph that yields NaN is refused."""
    module, signature = tiny("mlp")
    recipe = Recipe(Sgd(momentum=0.875))
    graph = write_train_graph(module, signature, recipe)
    with calm_torch(), pytest.raises(ExportError, match="differs from PyTorch"):
        check_train(
            tampered(graph.data, 0.875, float("nan")),
            module,
            recipe,
            batches_for(module, signature),
        )


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("expected", [np.inf, np.nan, 1.0])
def test_an_infinite_value_is_a_deviation(value: float, expected: float) -> None:
    """Also where PyTorch's own value is not finite, which no lowering can mend."""
    worst = WorstDeviation()
    one = np.ones(1, np.float32)
    worst.compare({"loss": one}, {"loss": one})
    worst.compare({"step": one * np.float32(value)}, {"step": one * np.float32(expected)})
    named = "step of onnx/train is not finite in PyTorch itself"
    if np.isfinite(expected):
        named = "step deviates by inf"
    with pytest.raises(ExportError, match=named):
        worst.report("onnx/train", 1)


def test_a_broken_graph_is_an_export_error() -> None:
    """Bytes the runtime refuses are reported as such."""
    module, signature = tiny("mlp")
    with pytest.raises(ExportError, match="refuses the exported graph"):
        check_train(b"not a graph", module, Recipe(), batches_for(module, signature))


def test_reports_say_what_was_compared() -> None:
    """The report carries steps, batch sizes, both figures and the worst tensor."""
    module, signature = tiny("lenet5")
    graph = write_train_graph(module, signature, Recipe())
    with calm_torch():
        report = check_train(graph.data, module, Recipe(), batches_for(module, signature, (8, 3)))
    assert report.graph == "onnx/train"
    assert report.steps >= 5
    assert report.batch_sizes == (8, 3)
    assert 0 < report.worst_absolute <= 1e-5
    assert report.worst_relative <= LIMIT
    assert report.worst_tensor
    assert report.runtime.startswith("onnxruntime ")


@functools.cache
def ill_conditioned(momentum: float) -> tuple[bytes, nn.Module, Recipe, SizedBatches]:
    """HeteroFL's Transformer at its level e of a narrow model: norms over four units behind Scalers
    of 16.
    """
    settings = {
        "input_shape": (64,),
        "embed": 64,
        "heads": 8,
        "ffn": 64,
        "blocks": 2,
        "classes": 50,
    }
    torch.manual_seed(0)
    module = build(ZOO.get("transformer_mlm"), 0.0625, None, settings)
    signature = Signature((64,), "int64", 50).with_places_of(module)
    signature = replace(signature, noise=model_noise(module, signature))
    recipe = Recipe(Sgd(momentum=momentum, weight_decay=5e-4), clip_norm=1.0)
    graph = write_train_graph(module, signature, recipe)
    return graph.data, module, recipe, batches_for(module, signature)


@pytest.mark.slow
def test_float64_decides_where_pytorch_itself_rounds_by_more_than_the_limit() -> None:
    """Such a step is published though it agrees in no run: PyTorch in float32 is as far from
    float64 as it is.
    """
    data, module, recipe, batches = ill_conditioned(0.875)
    runs: list[bool] = []

    def watched(run: Run, batches: SizedBatches, in_float64: DoubleRun | None) -> CheckSpec:
        def told(seeded: SizedBatches, exact: bool) -> CheckSpec:
            runs.append(exact)
            return run(seeded, exact)

        return repeated(told, batches, in_float64)

    with calm_torch(), mock.patch("trainer_export.double_graph.repeated", watched):
        report = check_train(data, module, recipe, batches)
    assert runs[:6] == [False] * 5 + [True]
    assert report.worst_relative < 1e-2


@pytest.mark.slow
def test_a_fault_is_found_in_such_a_step_too() -> None:
    """Three in a hundred of the momentum are not taken for rounding."""
    data, module, recipe, batches = ill_conditioned(0.875)
    with calm_torch(), pytest.raises(ExportError, match=r"state\.\S+ deviates by"):
        check_train(tampered(data, 0.875, 0.9), module, recipe, batches)


class Float32Only(nn.Module):
    """A network that casts its samples to float32, so weights in float64 do not go with them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(x.float())
        return logits


def test_a_module_that_cannot_be_in_float64_is_judged_by_float32() -> None:
    """It fails by the limit for float32, and not with PyTorch's error about dtypes."""
    inner, signature = tiny("mlp")
    module = Float32Only(inner)
    recipe = Recipe(Sgd(momentum=0.875))
    graph = write_train_graph(module, signature, recipe)
    with calm_torch(), pytest.raises(ExportError, match=r"limit 1e-04"):
        check_train(
            tampered(graph.data, 0.875, 0.5), module, recipe, batches_for(module, signature)
        )
