"""Labels that a device does not have: the logit zero, or the probability zero (specification 1.5)."""

import numpy as np
import pytest
import torch
from torch import nn

from fleet_protocol.errors import ConfigError
from models.zoo.randomized_model import vocabulary_of
from tests.trainer_export.test_losses import made
from trainer_export.batches import SizedBatches
from trainer_export.check import open_session, run_session
from trainer_export.formats.onnx import write_train_graph
from trainer_export.loss import Answer, loss_named
from trainer_export.losses.cross_entropy import (
    MaskedCrossEntropy,
    correct_count,
    loss_and_logit_gradient,
    loss_sum,
)
from trainer_export.optimizers.sgd import Sgd
from trainer_export.recipe import Recipe

PRESENT = torch.tensor([1.0, 0.0, 1.0, 0.0])


def test_h6_with_zero_probability():
    """Loss and gradient are those of the present labels by themselves."""
    logits = torch.tensor([[2.0, -1.0, 0.5, 1.0]])
    loss, gradient = loss_and_logit_gradient(
        logits, torch.tensor([2]), PRESENT, zero_probability=True
    )
    assert loss.item() == pytest.approx(1.701413, abs=1e-6)
    expected = torch.tensor([[0.817574, 0.0, -0.817574, 0.0]])
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=0)
    summed = loss_sum(logits, torch.tensor([2]), PRESENT, zero_probability=True)
    assert summed.item() == pytest.approx(1.701413, abs=1e-6)


def test_h6b_never_predicts_an_absent_label():
    """With the logit zero, label 1 would win; with the probability zero, label 2 does."""
    logits = torch.tensor([[-3.0, 5.0, -1.0, 0.2]])
    for zero_probability, winner in ((False, 1), (True, 2)):
        hits = [
            int(
                correct_count(
                    logits,
                    torch.tensor([label]),
                    PRESENT,
                    zero_probability=zero_probability,
                )
            )
            for label in range(4)
        ]
        assert hits.index(1) == winner


@pytest.mark.parametrize("model", ["mlp", pytest.param("next_word", marks=pytest.mark.slow)])
def test_a_step_is_that_of_logits_without_the_absent_labels(model):
    """The graph's loss and parameters equal PyTorch's cross entropy of the present logits."""
    module, signature = made(model)
    loss = loss_named("masked-cross-entropy", {"zero_probability": True})
    recipe = Recipe(Sgd(weight_decay=0.0), loss, clip_norm=None)
    session = open_session(write_train_graph(module, signature, recipe).data)
    x, y = next(SizedBatches(signature, vocabulary_of(module), (7,)).draw(1))
    y = y % 2  # the last of three labels is absent
    inputs = {
        "x": x.numpy(),
        "y": y.numpy(),
        "mask": np.array([1, 1, 0], np.float32),
        "lr": np.array(0.1, np.float32),
    }
    shapes = {}
    for name, value in module.named_parameters():
        inputs[f"param.{name}"] = value.detach().numpy().copy()
        shapes[name] = tuple(value.shape)
    for state in recipe.optimizer.state_specs(shapes):
        inputs[f"state.{state.name}"] = np.full(state.shape, state.initial, np.float32)
    stepped = run_session(session, inputs)
    present = module(x)[..., :2]
    expected = nn.functional.cross_entropy(present.flatten(0, -2), y.flatten())
    assert stepped["loss"] == pytest.approx(expected.item(), abs=1e-5)
    expected.backward()
    for name, value in module.named_parameters():
        after = value.detach() - 0.1 * value.grad
        np.testing.assert_allclose(stepped[f"next.param.{name}"], after.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "trained", "tested"),
    [
        ({}, False, False),
        ({"zero_probability": True}, True, False),
        ({"tests_zero_probability": True}, False, True),
    ],
)
def test_training_and_evaluation_choose_separately(settings, trained, tested):
    """The paper zeroes logits in training, and gives probability zero in the local evaluation."""
    loss = loss_named("masked-cross-entropy", settings)
    logits = torch.tensor([[-3.0, 5.0, -1.0, 0.2]])
    answer = Answer(torch.tensor([2]), PRESENT)
    expected, _ = loss_and_logit_gradient(logits, answer.y, PRESENT, zero_probability=trained)
    assert loss.value(logits, answer) == expected
    torch.testing.assert_close(loss.pytorch(logits, answer), expected)
    losses, hits = loss.sums(logits, answer)
    assert int(hits) == int(tested)
    assert losses == loss_sum(logits, answer.y, PRESENT, zero_probability=tested)
    torch.testing.assert_close(loss.pytorch_sums(logits, answer)[0], losses)
    predicted, _ = loss.decided(logits, answer)
    assert predicted.argmax() == (2 if tested else 1)


def test_earlier_manifests_stay_the_same():
    """Parameters that are not set are not written, whatever else is."""
    assert MaskedCrossEntropy().spec((3,)).settings == {}
    smoothed = MaskedCrossEntropy(label_smoothing=0.1).spec((3,)).settings
    assert set(smoothed) == {"label_smoothing", "class_weights", "ignore_label"}
    written = MaskedCrossEntropy(zero_probability=True).spec((3,)).settings
    assert written["zero_probability"] is True
    assert "tests_zero_probability" not in written


def test_smoothing_is_refused():
    with pytest.raises(ConfigError, match="label_smoothing gives every label a share"):
        loss_named("cross-entropy", {"label_smoothing": 0.1, "tests_zero_probability": True})
