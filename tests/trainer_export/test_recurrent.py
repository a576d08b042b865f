"""Recurrent layers train as in PyTorch, in a graph whose size does not depend on the number of
steps.
"""

import onnx
import pytest
import torch
from torch import Tensor, nn

from fleet_protocol.errors import ExportError
from fleet_protocol.graphs.check import check_structure
from fleet_protocol.graphs.exposure import exposed_outputs
from tests.marking import mostly_slow
from tests.trainer_export.helpers import (
    all_reports,
    assert_portable,
    deviation,
    shaken,
    train_report,
)
from trainer_export.formats.onnx import write_train_graph
from trainer_export.model_inputs import Signature
from trainer_export.recipe import Recipe
from trainer_export.recurrence import CELLS, back, forth

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

SEQUENCE = Signature((6, 5), "float32", 3)


class Reader(nn.Module):
    """A classifier on what a recurrent layer says at the end, and on its last states."""

    def __init__(self, kind: type[nn.RNNBase], first: bool = True, **settings: object) -> None:
        super().__init__()
        self.first = first
        self.layer = kind(5, 4, batch_first=first, **settings)
        ways = 2 if self.layer.bidirectional else 1
        shown = self.layer.proj_size or 4
        self.head = nn.Linear(shown * (ways + 1) + 4 * isinstance(self.layer, nn.LSTM), 3)

    def forward(self, x: Tensor) -> Tensor:
        said, states = self.layer(x if self.first else x.transpose(0, 1))
        ends = [state[-1] for state in (states if isinstance(states, tuple) else (states,))]
        return self.head(torch.cat([said[:, 2] if self.first else said[2], *ends], 1))


KINDS = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    (nn.LSTM, {"bias": False, "first": False}),
    (nn.LSTM, {"proj_size": 3, "num_layers": 2, "bidirectional": True}),
    (nn.GRU, {}),
    (nn.GRU, {"num_layers": 3}),
    (nn.GRU, {"bidirectional": True, "bias": False}),
    (nn.RNN, {}),
    (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
]


@pytest.mark.parametrize(
    ("kind", "settings"), mostly_slow(KINDS, lambda case: case == (nn.GRU, {}))
)
def test_recurrent_layers(kind: type[nn.RNNBase], settings: dict[str, object]) -> None:
    """Layers, directions, with and without bias: several steps of training against eager
    PyTorch.
    """
    torch.manual_seed(3)
    assert train_report(shaken(Reader(kind, **settings)), SEQUENCE).worst_absolute <= 1e-5


@pytest.mark.slow
def test_every_graph_of_a_recurrent_model() -> None:
    """Evaluation and inference loop as training does."""
    torch.manual_seed(3)
    assert (
        deviation(all_reports(shaken(Reader(nn.LSTM, bidirectional=True)), SEQUENCE).values())
        <= 1e-5
    )


def test_states_to_start_with() -> None:
    """A layer may start from states that are computed, and their gradient goes on."""

    class Started(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start = nn.Linear(5, 4)
            self.layer = nn.GRU(5, 4, batch_first=True)
            self.head = nn.Linear(4, 3)
            self.cell = nn.LSTM(5, 6, batch_first=True, proj_size=4)

        def forward(self, x: Tensor) -> Tensor:
            start = self.start(x[:, 0]).unsqueeze(0)
            projected, _ = self.cell(x, (start, torch.cat([start, start[..., :2]], 2)))
            return self.head(self.layer(x, start)[0].mean(1) + projected.mean(1))

    torch.manual_seed(3)
    assert train_report(shaken(Started()), SEQUENCE).worst_absolute <= 1e-5


def test_weights_that_are_computed() -> None:
    """A loop may read what the graph makes before it, and the passes over the graph keep that."""

    class Gains(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    module = Reader(nn.GRU)
    nn.utils.parametrize.register_parametrization(module.layer, "weight_hh_l0", Gains())
    torch.manual_seed(3)
    assert train_report(shaken(module), SEQUENCE).worst_absolute <= 1e-5


@pytest.mark.parametrize("kind", [nn.LSTM, pytest.param(nn.GRU, marks=pytest.mark.slow)])
def test_the_graph_is_that_of_one_step(kind: type[nn.RNNBase]) -> None:
    """Of fifty steps as of five, in standard operators."""

    def nodes(steps: int) -> onnx.ModelProto:
        return write_train_graph(Reader(kind), Signature((steps, 5), "float32", 3), Recipe()).model

    short = nodes(5)
    long = nodes(50)
    assert_portable(long)
    assert not exposed_outputs(
        check_structure(memoryview(long.SerializeToString())), ["x", "y", "mask"]
    )
    assert len(short.graph.node) == len(long.graph.node)
    assert [node.op_type for node in long.graph.node].count("Scan") == 2


@pytest.mark.parametrize("kind", CELLS)
def test_the_gradient_of_a_step_is_autograds(kind: str) -> None:
    """With respect to everything that it reads."""
    cell = CELLS[kind]
    torch.manual_seed(4)
    shapes = [(2, 4 * cell.gates), (4 * cell.gates, 4), (4 * cell.gates,), *[(2, 4)] * cell.states]
    z, weight, bias, *states = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes
    )
    made = forth(cell, z, weight, bias, states)
    slopes = [torch.randn_like(state) for state in made]
    *expected, to_bias = torch.autograd.grad(made, [*states, z, bias], slopes)
    *found, to_gates = back(cell, slopes, z, weight, bias, states)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(to_gates.sum(0), to_bias)


@pytest.mark.parametrize(
    ("layer", "message"),
    [(nn.GRU(5, 4, 2, dropout=0.1), "dropout between its layers.*Dropout of models.zoo.dropout")],
)
def test_what_a_loop_does_not_know(layer: nn.Module, message: str) -> None:
    """Dropout inside is refused with what to do."""

    class Only(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[0][:, 0]

    with pytest.raises(
        ExportError, match=rf"module layer \((LSTM|GRU)\), line \d+ of test_recurrent.py.*{message}"
    ):
        train_report(Only(), SEQUENCE)
