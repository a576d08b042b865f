"""Every optimizer on three models, bounds of the gradient, and micro-batches: twenty steps as
PyTorch's own.
"""

import numpy as np
import pytest
import torch
from torch import nn

from device_runtime.training.backends import TrainSession
from fleet_protocol.errors import ConfigError, ExportError, RefusedError
from fleet_protocol.manifest import next_name, parameter_input, state_input
from models.zoo.randomized_model import vocabulary_of
from tests.marking import mostly_slow
from tests.trainer_export.helpers import batches_for, tiny, train_report
from tests.trainer_export.test_losses import LEARNING_RATE, STEPS, exported, ignoring, made
from tests.trainer_export.test_records import CASES
from trainer_export.batches import SizedBatches
from trainer_export.check import calm_torch, open_session, run_session
from trainer_export.formats.onnx import write_train_graph
from trainer_export.optimizers.adam import Adam, AdamW
from trainer_export.optimizers.sgd import Sgd
from trainer_export.pair_step import trace_pair
from trainer_export.recipe import Recipe
from trainer_export.routines.mutual import MUTUAL
from trainer_export.train_check import check_train

BATCH = 7
PIECE = 3
ALL = ("mlp", "pixels", "words")


def distance(model, recipe, optimizer, *, clip=lambda _: None, piece=BATCH):
    """The largest difference of any parameter after twenty steps of a graph and of PyTorch, both in
    such pieces.
    """
    module, signature = made(model)
    session = open_session(write_train_graph(module, signature, recipe).data)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    reference = optimizer(module.parameters())
    loss = ignoring()
    now = {
        parameter_input(name): p.detach().numpy().copy() for name, p in module.named_parameters()
    }
    now |= {
        state_input(s.name): np.full(s.shape, s.initial, np.float32)
        for s in recipe.state_specs(shapes)
    }
    fixed = {
        "mask": np.ones(signature.classes, np.float32),
        "lr": np.array(LEARNING_RATE, np.float32),
    }
    for x, y in SizedBatches(signature, vocabulary_of(module), (BATCH,), loss=recipe.loss).draw(
        STEPS
    ):
        reference.zero_grad()
        for first in range(0, BATCH, piece):
            part = slice(first, first + piece)
            share = float((y[part] >= 0).sum() / (y >= 0).sum())
            (loss(module(x[part]), y[part]) * share).backward()
            given = {
                "x": x[part].numpy(),
                "y": y[part].numpy(),
                "share": np.array(share, np.float32),
            }
            given |= {"last": np.array(part.stop >= BATCH, np.float32)}
            found = run_session(session, {**now, **fixed, **given})
            before = now
            now = {name: found[next_name(name)] for name in now}
            still = [name for name in now if "gradient_sum" not in name and part.stop < BATCH]
            assert all(np.array_equal(now[name], before[name]) for name in still)
        clip(module.parameters())
        reference.step()
    named = {parameter_input(name): p.detach().numpy() for name, p in module.named_parameters()}
    return max(float(np.abs(now[name] - value).max()) for name, value in named.items())


@pytest.mark.parametrize("model", mostly_slow(ALL, lambda model: model == "mlp"))
@pytest.mark.parametrize(
    ("optimizer", "pytorch", "settings"), CASES, ids=lambda case: getattr(case, "name", "")
)
def test_twenty_steps_are_those_of_pytorchs_own_class(optimizer, pytorch, settings, model):
    """Within 1e-5, of perceptrons, convolutions, and an embedding with a norm."""
    recipe = Recipe(optimizer, clip_norm=None)
    assert distance(model, recipe, lambda p: pytorch(p, lr=LEARNING_RATE, **settings)) <= 1e-5


def test_entries_of_the_gradient_are_bounded_before_their_norm():
    """As PyTorch's own functions in that order; without either the way is another."""

    def clip(parameters):
        kept = list(parameters)
        nn.utils.clip_grad_value_(kept, 0.01)
        nn.utils.clip_grad_norm_(kept, 0.05)

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9, weight_decay=5e-4)

    assert distance("mlp", Recipe(Sgd(), clip_norm=0.05, clip_value=0.01), sgd, clip=clip) <= 1e-6
    for other in (Recipe(Sgd(), clip_norm=0.05), Recipe(Sgd(), clip_norm=None, clip_value=0.01)):
        assert distance("mlp", other, sgd, clip=clip) > 1e-4
    with pytest.raises(ConfigError, match="clip_value"):
        Recipe(clip_value=-1.0)


@pytest.mark.parametrize("model", mostly_slow(ALL, lambda model: model == "mlp"))
@pytest.mark.parametrize("piece", [PIECE, BATCH])
def test_a_batch_in_pieces_is_pytorchs_accumulated_step(model, piece):
    """Pieces of 3, 3 and 1 samples, weighted by the labels that count, clipped and stepped once;
    and whole batches.
    """
    recipe = Recipe(AdamW(), clip_norm=0.5, accumulate=True)

    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE)

    def clip(parameters):
        nn.utils.clip_grad_norm_(parameters, 0.5)

    assert distance(model, recipe, adamw, clip=clip, piece=piece) <= 1e-5


def test_a_board_takes_a_batch_in_pieces(tmp_path):
    """Loss and parameters are those of whole batches within 1e-5; a set without sums refuses, and
    says what to do.
    """
    recipe = Recipe(AdamW(), accumulate=True)
    place, manifest, module = exported(tmp_path, "words", recipe)
    graph = place / manifest.graphs["onnx/train"].path
    whole, pieces = (TrainSession(manifest, graph) for _ in range(2))
    pieces.split_batches(PIECE)
    for session in (whole, pieces):
        session.load({name: p.detach().numpy().copy() for name, p in module.named_parameters()})
    signature = made("words")[1]
    for x, y in SizedBatches(signature, vocabulary_of(module), (BATCH, 2), loss=recipe.loss).draw(
        STEPS
    ):
        batch = (x.numpy(), y.numpy(), np.ones(signature.classes, np.float32), LEARNING_RATE)
        assert whole.step(*batch) == pytest.approx(pieces.step(*batch), abs=1e-5)
    for name, value in whole.parameters().items():
        np.testing.assert_allclose(pieces.parameters()[name], value, rtol=0, atol=1e-5)
    spec = Recipe().spec((3,))
    assert "accumulate" not in spec.model_dump()  # digests of earlier sets stay what they are
    with pytest.raises(RefusedError, match="export it again with accumulate = true"):
        TrainSession(manifest.model_copy(update={"recipe": spec}), graph).split_batches(PIECE)


def test_a_pair_takes_whole_batches():
    """The other model's outputs are those of the whole batch."""
    module, signature = made("mlp")
    with pytest.raises(ConfigError, match="micro-batches"):
        trace_pair(MUTUAL, (module, module), signature, Recipe(accumulate=True))


@pytest.mark.parametrize(
    "recipe", [Recipe(AdamW()), Recipe(Adam(weight_decay=0.1), clip_norm=None)]
)
@pytest.mark.slow
def test_parameters_without_a_slope_do_not_fail_the_comparison(recipe):
    """A bias of keys has a gradient of zero but for rounding, which Adam would divide by itself in
    its first steps.
    """
    module, signature = tiny("next_word", 0.5)
    assert train_report(module, signature, recipe).worst_relative <= 1e-5


@pytest.mark.parametrize(
    "other", [AdamW(beta1=0.8), AdamW(beta2=0.99), AdamW(eps=1e-3), AdamW(weight_decay=0.1)]
)
def test_the_comparison_sees_another_rule(other):
    """Also one of which only a number differs, from states of a training that is under way."""
    module, signature = tiny("mlp")
    graph = write_train_graph(module, signature, Recipe(AdamW())).data
    with calm_torch(), pytest.raises(ExportError, match="differs from PyTorch"):
        check_train(graph, module, Recipe(other), batches_for(module, signature))
