"""The mutual step as one portable graph of two models."""

import pytest

from fleet_protocol.errors import ConfigError, ExportError
from tests.marking import mostly_slow
from tests.trainer_export.helpers import assert_portable, batches_for, deviation, tiny
from trainer_export.check import calm_torch
from trainer_export.lowering.program import write_graph
from trainer_export.optimizers.sgd import Sgd
from trainer_export.pair_check import check_pair
from trainer_export.pair_step import trace_pair
from trainer_export.recipe import Recipe
from trainer_export.routines.mutual import MUTUAL

PAIRS = [
    ("mlp", 1.0, "mlp", 0.5),
    ("conv", 0.5, "conv", 1.0),
    ("next_word", 0.5, "next_word", 1.0),
    ("token_classifier", 1.0, "token_classifier", 0.5),
]


def pair(personal, meme):
    (one, signature), (two, other) = tiny(*personal), tiny(*meme)
    assert signature == other
    return one, two, signature


@pytest.mark.parametrize(
    ("personal", "meme"),
    mostly_slow([(one[:2], one[2:]) for one in PAIRS], lambda case: case[0][0] == "mlp"),
    ids=[case[0] for case in PAIRS],
)
@pytest.mark.parametrize(
    "recipe", [Recipe(), Recipe(Sgd(momentum=0.0, weight_decay=0.0), clip_norm=None)]
)
def test_graph_agrees_with_pytorch(personal, meme, recipe):
    """Six steps of both models, their noise and labels per token included, against autograd and
    torch's KL.
    """
    personal, meme, signature = pair(personal, meme)
    model = write_graph(trace_pair(MUTUAL, (personal, meme), signature, recipe))
    assert_portable(model)
    with calm_torch():
        batches = batches_for(personal, signature)
        report = check_pair(model.SerializeToString(), MUTUAL, (personal, meme), recipe, batches)
    assert report.steps >= 5
    assert deviation([report]) <= 1e-5


def test_frozen_parameters_are_refused_until_they_are_free():
    """A pair trains all of both models."""
    personal, meme, signature = pair(("mlp", 1.0), ("mlp", 0.5))
    frozen, layer = next(iter(meme.named_parameters()))
    layer.requires_grad_(False)
    with pytest.raises(
        ExportError,
        match=f"parameter {frozen} of the sent model is frozen.*requires_grad = True, or",
    ):
        trace_pair(MUTUAL, (personal, meme), signature, Recipe())
    layer.requires_grad_(True)
    assert trace_pair(MUTUAL, (personal, meme), signature, Recipe()).outputs


def test_names_tell_the_models_apart():
    """Every tensor of a model has its side before it, also where both have a parameter of the same
    name.
    """
    personal, meme, signature = pair(("conv", 1.0), ("conv", 0.5))
    trace = trace_pair(MUTUAL, (personal, meme), signature, Recipe())
    inputs, outputs = ({p.name: p.shape for p in ports} for ports in (trace.inputs, trace.outputs))
    for side, module in (("own", personal), ("sent", meme)):
        for name, parameter in module.named_parameters():
            for kind in ("param", "state"):
                assert (
                    inputs[f"{side}.{kind}.{name}"]
                    == outputs[f"next.{side}.{kind}.{name}"]
                    == parameter.shape
                )
    assert list(outputs)[:2] == ["own.loss", "sent.loss"]
    assert [inputs[name] for name in ("alpha", "beta", "lr")] == [(), (), ()]


def test_models_of_different_tasks_are_refused():
    """Both must return logits of the same labels."""
    personal, signature = tiny("mlp")
    other, _ = tiny("conv")
    with pytest.raises(ExportError):
        trace_pair(MUTUAL, (personal, other), signature, Recipe())


def test_a_proximal_term_is_refused():
    """It belongs to another method."""
    personal, meme, signature = pair(("mlp", 1.0), ("mlp", 0.5))
    with pytest.raises(ConfigError, match="neither a proximal term nor micro-batches"):
        trace_pair(MUTUAL, (personal, meme), signature, Recipe(proximal=True))
