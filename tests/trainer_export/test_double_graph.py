"""A graph in float64 tells rounding from a fault, for steps, statistics and outputs."""

from unittest import mock

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn

from fleet_protocol.errors import ExportError
from fleet_protocol.manifest import CheckSpec
from models.zoo.layers import StaticBatchNorm
from tests.trainer_export.helpers import batches_for, shaken, tiny
from trainer_export.batches import SizedBatches
from trainer_export.check import calm_torch
from trainer_export.formats.onnx import write_forward_graphs, write_train_graph
from trainer_export.model_inputs import Signature
from trainer_export.recipe import Recipe
from trainer_export.repeated_check import DoubleRun, Run
from trainer_export.routines.statistics import check_statistics
from trainer_export.train_check import check_train


def only_in_float64(run: Run, batches: SizedBatches, in_float64: DoubleRun | None) -> CheckSpec:
    """The comparison in float64 by itself, as it follows when no other agrees."""
    assert in_float64 is not None
    return in_float64()(batches.few(), True)


def images() -> tuple[nn.Module, Signature]:
    """Operators that the evaluator lets PyTorch compute."""
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        StaticBatchNorm(4),
        nn.GELU(),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(4, 4, (3, 1), 2, (1, 0), groups=2),
        nn.MaxPool2d(2, 2, ceil_mode=True),
        nn.ConvTranspose2d(4, 2, 3, 2, 1, output_padding=1),
        nn.Flatten(),
        nn.LazyLinear(3),
    )
    module(torch.zeros(2, 1, 9, 11))
    return shaken(module), Signature((1, 9, 11), "float32", 3)


@pytest.mark.parametrize("model", ["lenet5", "conv", "text_encoder", "images"])
def test_a_step_in_float64_agrees_to_its_constants(model: str) -> None:
    """Convolutions, maxima with their places and norms agree far better than float32 rounds."""
    module, signature = images() if model == "images" else tiny(model)
    graph = write_train_graph(module, signature, Recipe())
    with calm_torch(), mock.patch("trainer_export.double_graph.repeated", only_in_float64):
        report = check_train(graph.data, module, Recipe(), batches_for(module, signature, (5, 2)))
    assert report.runtime.endswith("float64")
    assert report.worst_relative < 1e-6


class Cancelling(nn.Module):
    """Subtracts two nearly equal products, so that most of the variance is rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(700, 4, bias=False)
        self.second = nn.Linear(700, 4, bias=False)
        self.norm = StaticBatchNorm(4)
        with torch.no_grad():
            self.second.weight.copy_(self.first.weight * (1 + 3e-5))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.norm(self.first(x) - self.second(x))
        return logits


def statistics_of_rounding() -> tuple[bytes, nn.Module, SizedBatches]:
    """A statistics graph that deviates from PyTorch by far more than the limit, though right."""
    torch.manual_seed(0)
    module = Cancelling()
    signature = Signature((700,), "float32", 4)
    graphs = {graph.key: graph for graph in write_forward_graphs(module, signature, Recipe())}
    return graphs["onnx/stats"].data, module, batches_for(module, signature, (8, 3))


def test_statistics_of_rounding_are_published_with_their_runtime() -> None:
    """The figures are those of the run in float64, and say so."""
    data, module, batches = statistics_of_rounding()
    with calm_torch():
        report = check_statistics(data, module, Recipe(), batches)
    assert report.runtime.endswith("float64")
    assert report.worst_relative < 1e-6


def test_a_fault_in_such_statistics_is_found() -> None:
    """A variance that is off by a thousandth, which is less than float32 rounds here."""
    data, module, batches = statistics_of_rounding()
    model = onnx.load_model_from_string(data)
    for node in model.graph.node:
        if node.output[0] == "stat.norm.var":
            node.output[0] = "right"
    model.graph.initializer.append(numpy_helper.from_array(np.float32([1.001]), "factor"))
    model.graph.node.append(helper.make_node("Mul", ["right", "factor"], ["stat.norm.var"]))
    with calm_torch(), pytest.raises(ExportError, match=r"onnx/stats.*stat\.norm"):
        check_statistics(model.SerializeToString(), module, Recipe(), batches)
