"""The graph writer, the recipe and the cost model on their own."""

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from models import build
from tests.trainer_export.helpers import ZOO, tiny
from trainer_export.check import open_session, run_session
from trainer_export.footprint import count_flops, peak_memory
from trainer_export.formats.onnx import write_train_graph
from trainer_export.graph import GraphBuilder, Port
from trainer_export.losses.cross_entropy import loss_and_logit_gradient
from trainer_export.model_inputs import Signature
from trainer_export.optimizers.sgd import Sgd
from trainer_export.recipe import Recipe
from trainer_export.update import TrainedTensors, update


def test_equal_nodes_and_constants_exist_once_and_dead_ones_not_at_all() -> None:
    """Dispatcher twice gives the same value; what no output needs is not written."""
    g = GraphBuilder("g")
    x = g.input(Port("x", "float32", ("batch", 2)))
    first = g.node("Add", x, g.scalar(1.0))
    again = g.node("Add", x, g.scalar(1.0))
    g.node("Mul", x, g.scalar(5.0))
    assert first == again
    g.output(Port("y", "float32", ("batch", 2)), first)
    model = g.model()
    assert [node.op_type for node in model.graph.node] == ["Add"]
    assert len(model.graph.initializer) == 1


def test_outputs_may_share_a_value_or_be_an_input() -> None:
    """Each output has its own name, whatever it is made of."""
    g = GraphBuilder("g")
    x = g.input(Port("x", "float32", (2,)))
    y = g.node("Neg", x)
    for name, value in (("a", y), ("b", y), ("c", x)):
        g.output(Port(name, "float32", (2,)), value)
    model = g.model()
    onnx.checker.check_model(model)
    outputs = run_session(
        open_session(model.SerializeToString()), {"x": np.array([1, -2], np.float32)}
    )
    assert {name: value.tolist() for name, value in outputs.items()} == {
        "a": [-1, 2],
        "b": [-1, 2],
        "c": [1, -2],
    }


@settings(max_examples=25, deadline=None)
@given(batch=st.integers(1, 6), classes=st.integers(2, 5), seed=st.integers(0, 1000))
def test_closed_form_of_the_loss_gradient(batch: int, classes: int, seed: int) -> None:
    """It is the derivative of cross entropy on masked logits, which zeroes absent labels
    (specification 1.5).
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(
        batch, classes, generator=generator, dtype=torch.float64, requires_grad=True
    )
    y = torch.randint(0, classes, (batch,), generator=generator)
    mask = (torch.rand(classes, generator=generator) > 0.4).double()
    expected = nn.functional.cross_entropy(logits * mask, y)
    (slope,) = torch.autograd.grad(expected, logits)
    loss, gradient = loss_and_logit_gradient(logits.detach(), y, mask)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, slope)


@settings(max_examples=20, deadline=None)
@given(
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    decay=st.sampled_from([0.0, 0.01]),
    clip=st.sampled_from([None, 0.1, 100.0]),
    count=st.integers(1, 6),
)
def test_the_optimizer_is_pytorchs(
    momentum: float, decay: float, clip: float | None, count: int
) -> None:
    """Three steps equal torch.optim.SGD after clip_grad_norm_, whether tensors are joined or
    not.
    """
    generator = torch.Generator().manual_seed(count)
    shapes = [(3, i + 1) if i % 2 else (9000,) for i in range(count)]
    parameters = [torch.randn(shape, generator=generator) for shape in shapes]
    reference = [nn.Parameter(p.clone()) for p in parameters]
    optimizer = torch.optim.SGD(reference, lr=0.1, momentum=momentum, weight_decay=decay)
    zeros = {
        state.name: [torch.zeros_like(p) for p in parameters] for state in Sgd(momentum).states
    }
    trained = TrainedTensors(parameters, zeros)
    recipe = Recipe(Sgd(momentum=momentum, weight_decay=decay), clip_norm=clip)
    for _ in range(3):
        gradients = [torch.randn(shape, generator=generator) for shape in shapes]
        for parameter, gradient in zip(reference, gradients, strict=True):
            parameter.grad = gradient.clone()
        if clip is not None:
            nn.utils.clip_grad_norm_(reference, clip)
        optimizer.step()
        trained = update(trained, gradients, torch.tensor(0.1), recipe)
    for found, expected in zip(trained.parameters, reference, strict=True):
        torch.testing.assert_close(found, expected.detach())


@pytest.mark.parametrize(("groups", "outputs"), [(1, 6), (2, 6), (4, 4)])
def test_gradients_of_a_grouped_convolution_count_like_its_forward_pass(groups, outputs):
    """A step is three passes, less the gradient of the samples, whatever the number of groups."""
    layers = nn.Sequential(
        nn.Conv2d(4, outputs, 3, padding=1, groups=groups), nn.Flatten(), nn.Linear(outputs * 25, 2)
    )
    forward, step = count_flops(layers, Signature((4, 5, 5), "float32", 2))
    convolution = 2 * 25 * outputs * 4 // groups * 9
    head = 2 * outputs * 25 * 2
    assert forward == convolution + head
    assert step == 2 * convolution + 3 * head


def test_flops_of_a_known_model() -> None:
    """Two per multiply-add: a layer of 4x3 weights is 24; its step adds the weight gradient, and no
    input gradient.
    """
    assert count_flops(nn.Linear(4, 3), Signature((4,), "float32", 3)) == (24, 48)


def test_flops_of_what_is_one_operator_on_the_cpu() -> None:
    """An LSTM, whose counter in PyTorch says 0: gates of inputs and units at each step, twice that
    backwards.
    """

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 64, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0][:, -1]

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x).unsqueeze(1)
            return nn.functional.scaled_dot_product_attention(y, y, y).flatten(1)

    forward, step = count_flops(Last(), Signature((100, 8), "float32", 64))
    assert forward == 100 * 2 * 4 * 64 * (8 + 64)
    assert step == 3 * forward
    assert count_flops(Attends(), Signature((10, 8), "float32", 80))[0] == 2 * 10 * 8 * 8 + 2 * (
        2 * 10 * 10 * 8
    )


def test_flops_fall_with_the_square_of_the_width() -> None:
    """HeteroFL's CNN at half width costs about a quarter (specification 1.1)."""
    arch = ZOO.get("conv")
    signature = Signature((1, 28, 28), "float32", 10)
    full, half = (count_flops(build(arch, width), signature)[0] for width in (1.0, 0.5))
    assert 3.6 < full / half < 4.1


def test_peak_memory_covers_two_sets_of_weights_and_grows_with_the_batch() -> None:
    """Inputs and outputs are both there at the end of a step; activations come on top."""
    module, signature = tiny("conv")
    model = write_train_graph(module, signature, Recipe()).model
    weights = sum(p.numel() * 4 for p in module.parameters())
    small = peak_memory(model, 1)
    large = peak_memory(model, 64)
    assert small > 4 * weights  # parameters and momenta, old and new
    assert large > small + 63 * 4 * 8 * 14 * 14  # at least one feature map of the first layer
