"""Models that draw random numbers in training: the numbers are inputs of the train graph."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fleet_protocol.manifest import noise_input, parameter_input
from models.zoo.dropout import Dropout, TokenMask
from models.zoo.noise_inputs import noise_layers
from tests.marking import mostly_slow
from tests.trainer_export.helpers import all_reports, deviation, graphs_of, tiny, train_report
from trainer_export.check import open_session, run_session
from trainer_export.lowering.program import write_graph
from trainer_export.model_inputs import Signature, model_noise
from trainer_export.optimizers.sgd import Sgd
from trainer_export.recipe import Recipe
from trainer_export.routines.train import trace_train

VECTOR = Signature((40,), "float32", 3)


class Dropping(nn.Module):
    """A model whose loss tells what the dropout did."""

    def __init__(self, rate: float = 0.3) -> None:
        super().__init__()
        self.first = nn.Linear(40, 40)
        self.drop = Dropout(rate)
        self.head = nn.Linear(40, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.relu(self.first(x))))


class Masking(nn.Module):
    """Logits that count which tokens were replaced."""

    def __init__(self, rate: float = 0.15) -> None:
        super().__init__()
        self.mask = TokenMask(rate, 4)
        self.table = nn.Embedding(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(self.mask(x)).sum(1)


def train_session(module, signature):
    return open_session(
        write_graph(
            trace_train(module, signature, Recipe(Sgd(0.0, 0.0), clip_norm=None))
        ).SerializeToString()
    )


@pytest.mark.parametrize(
    ("module", "signature"), [(Dropping(), VECTOR), (Masking(), Signature((7,), "int64", 3))]
)
def test_graphs_agree_with_pytorch_on_the_same_noise(module, signature):
    """Six steps with other random numbers each; PyTorch is fed the same ones."""
    assert train_report(module, signature).worst_absolute <= 1e-5


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        ["transformer_mlm", "next_word", "token_classifier", "minilm_encoder"],
        lambda name: name == "next_word",
    ),
)
def test_the_transformers_take_their_noise_from_outside(name):
    """Every active layer is one input with a dynamic batch, of the train graph alone; all graphs
    agree with PyTorch.
    """
    module, signature = tiny(name, 0.5, 1)
    layers = noise_layers(module.train())
    assert len(layers) > 2
    graphs = graphs_of(name, 0.5, 1)
    for graph in graphs:
        ports = {p.name: p for p in graph.inputs if p.name.startswith("noise.")}
        assert set(ports) == (
            {noise_input(path) for path in layers} if graph.key == "onnx/train" else set()
        )
        assert all(p.dtype == "float32" and p.shape[0] == "batch" for p in ports.values())
    assert deviation(all_reports(module, signature, graphs=graphs).values()) <= 1e-5


def test_a_layer_that_changes_nothing_has_no_input():
    """Rate 0 is the identity."""
    assert model_noise(Dropping(0.0), VECTOR) == {}
    assert model_noise(Dropping(0.3), VECTOR) == {"drop": (40,)}


def test_the_model_is_left_as_it_was():
    """No layer keeps a tensor of the trace, and torch's random state does not move."""
    module = Dropping()
    state = torch.get_rng_state()
    trace_train(module, VECTOR, Recipe())
    assert module.drop.noise is None
    assert module.drop.input_shapes is None
    assert torch.equal(state, torch.get_rng_state())


def test_a_layer_used_twice():
    """Each place has numbers of its own from the layer's input."""
    module = Dropping()
    twice = nn.Sequential(module.first, module.drop, module.drop, module.head)
    assert model_noise(twice, VECTOR) == {"1": (80,)}
    assert train_report(twice, VECTOR, sizes=(3, 2)).worst_absolute <= 1e-5


def test_dropout_in_the_graph_has_the_statistics_of_dropout():
    """Fed uniform numbers, a share `rate` of the entries is dropped and the rest scaled, so that
    the mean stays.

    The model is one entry per logit row: a head of ones over 40 dropped ones gives 40 * (kept / 40)
    / (1 - rate). The bias gradient cannot tell, but the weight's gradient is the kept activations
    themselves.
    """
    rate = 0.3
    count = 500
    module = nn.Sequential(Dropout(rate), nn.Linear(40, 3))
    session = train_session(module, VECTOR)
    parameters = {
        parameter_input(n): np.zeros(tuple(p.shape), np.float32)
        for n, p in module.named_parameters()
    }
    noise = np.random.default_rng(0).random((count, 40), np.float32)
    feed = {
        "x": np.ones((count, 40), np.float32),
        "y": np.zeros(count, np.int64),
        "mask": np.ones(3, np.float32),
    }
    outputs = run_session(
        session, {**parameters, **feed, noise_input("0"): noise, "lr": np.array(1.0, np.float32)}
    )
    # With zero weights the softmax is 1/3 everywhere: the first row of the gradient is -2/3 of the
    # mean activation.
    activation = outputs["next.param.1.weight"][0] / (2 / 3)
    kept = (noise >= rate).mean(0)
    np.testing.assert_allclose(activation, kept / (1 - rate), atol=1e-5)
    assert activation.mean() == pytest.approx(1.0, abs=4 * np.sqrt(rate / (1 - rate) / noise.size))
    assert activation.std() == pytest.approx(np.sqrt(rate / (1 - rate) / count), rel=0.5)


def test_the_token_mask_in_the_graph_hides_its_share():
    """The rows of the table that get a gradient are those of the tokens left and of the mask
    symbol.
    """
    rate = 0.15
    count = 400
    length = 10
    module = Masking(rate)
    session = train_session(module, Signature((length,), "int64", 3))
    noise = np.random.default_rng(1).random((count, length), np.float32)
    feed = {
        "x": np.zeros((count, length), np.int64),
        "y": np.zeros(count, np.int64),
        "mask": np.ones(3, np.float32),
    }
    feed |= {"param.table.weight": np.zeros((5, 3), np.float32), "lr": np.array(1.0, np.float32)}
    outputs = run_session(session, {**feed, noise_input("mask"): noise})
    moved = outputs["next.param.table.weight"][:, 0] / (2 / 3) / length
    share = (noise < rate).mean()
    np.testing.assert_allclose(moved, [1 - share, 0, 0, 0, share], atol=1e-5)
    assert share == pytest.approx(rate, abs=4 * np.sqrt(rate * (1 - rate) / noise.size))
