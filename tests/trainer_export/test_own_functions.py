"""Losses and metrics of the user's file: as PyTorch computes them, or refused with function, line
and what to do.
"""

import numpy as np
import pytest
import torch
from torch.nn import functional

from fleet_protocol.errors import ConfigError, ExportError
from fleet_protocol.metrics import evaluation_of, join_metrics
from fleet_protocol.recipe import RecipeTable
from models import Registry
from models.architecture import build
from models.tier import Tier
from shoal import loss, metric
from tests.trainer_export.helpers import ZOO
from tests.trainer_export.test_losses import evaluating, exported
from trainer_export.batches import SizedBatches
from trainer_export.loss import Answer
from trainer_export.model_inputs import Signature
from trainer_export.recipe import Recipe

FILE = """
import torch
from shoal import loss, metric

@loss(shape=(3,))
def pinball(outputs, targets, *, quantile=0.9):
    over = targets - outputs
    return torch.maximum(quantile * over, (quantile - 1) * over).mean(1)

@metric("root")
def far(outputs, targets, *, scale=1.0):
    return ((outputs - targets) * scale).pow(2).mean(1)

@metric()
def weighted(outputs, targets):
    weight = targets.sum(1)
    return (outputs.sum(1) > 0) * weight, weight

@metric("f1")
def above(outputs, targets):
    predicted, present = outputs > 0, targets > 0.5
    return predicted & present, predicted, present
"""


def test_a_file_brings_losses_and_metrics_by_name_with_numbers(tmp_path):
    """Boards' sums over batches of different sizes become what numpy makes of all samples; the
    manifest says how.
    """
    path = tmp_path / "my_models.py"
    path.write_text(FILE)
    registry = ZOO.with_file(path)
    assert registry.names == ZOO.names  # a file needs no architecture
    table = RecipeTable.model_validate(
        {
            "loss": {"name": "pinball", "quantile": 0.3},
            "metrics": [{"name": "far", "scale": 2.0}, "weighted", "above"],
            "clip_norm": 0,
        }
    )
    place, manifest, module = exported(tmp_path, "mlp", Recipe.from_table(table, registry.own))
    assert table.difference(manifest.recipe) == ""
    assert manifest.label_shape == (3,)
    session = evaluating(place, manifest, module)
    signature = Signature((1, 4, 4), "float32", 3)
    evaluations = []
    outputs = []
    targets = []
    for x, y in SizedBatches(signature, sizes=(9, 4), loss=registry.own["pinball"]()).draw(2):
        sums = session.evaluate(x.numpy(), y.numpy(), np.ones(3, np.float32))
        evaluations.append(evaluation_of(sums, len(y), manifest.recipe))
        outputs.append(module(x).detach().numpy())
        targets.append(y.numpy())
    o = np.concatenate(outputs)
    t = np.concatenate(targets)
    over = t - o
    weight = t.sum(1)
    predicted = o > 0
    present = t > 0.5
    hits = (predicted & present).sum(0)
    either = predicted.sum(0) + present.sum(0)
    expected = {
        "far": np.sqrt((4 * over**2).mean()),
        "weighted": ((o.sum(1) > 0) * weight).sum() / weight.sum(),
        "above": (2 * hits / either)[either > 0].mean(),
    }
    assert join_metrics(evaluations) == pytest.approx(expected, abs=1e-5)
    whole = sum(item.loss * item.examples for item in evaluations) / len(t)
    assert whole == pytest.approx(np.maximum(0.3 * over, -0.7 * over).mean(), abs=1e-5)
    assert evaluations[0].accuracy is None


@loss("int64")
def focal(outputs, targets, *, gamma=2.0):
    """Of the file of a user."""
    right = torch.log_softmax(outputs, 1).gather(1, targets[:, None])[:, 0]
    return -((1 - right.exp()) ** gamma) * right


@pytest.mark.slow
def test_labels_come_as_labels_and_accuracy_may_be_a_metric(tmp_path):
    """Boards hand over float32; a function that asked for int64 gets it, and a metric what its loss
    takes.
    """

    @metric()
    def hits(outputs, targets):
        assert targets.dtype == torch.int64
        return outputs.argmax(1) == targets

    for recipe in (Recipe(loss=focal(gamma=1.5), metrics=(hits(),)), Recipe(metrics=(hits(),))):
        place, manifest, module = exported(tmp_path, "mlp", recipe)
        x = torch.randn(6, 1, 4, 4)
        y = torch.tensor([0, 1, 2, 2, 1, 0])
        given = y.float().numpy() if manifest.recipe.loss.target == "float32" else y.numpy()
        sums = evaluating(place, manifest, module).evaluate(
            x.numpy(), given, np.ones(3, np.float32)
        )
        found = evaluation_of(sums, 6, manifest.recipe)
        right = (module(x).argmax(1) == y).float().mean().item()
        assert found.metrics[0].value == pytest.approx(right)
        assert found.accuracy in (None, pytest.approx(right))


def batch_of(recipe, classes=3):
    """Outputs of a model, and random targets."""
    module = build(
        ZOO.get("mlp"), Tier(1.0, 1), settings={"input_shape": (1, 4, 4), "classes": classes}
    )
    batches = SizedBatches(Signature((1, 4, 4), "float32", classes), loss=recipe.loss)
    x, y = next(iter(batches.draw(1)))
    return module(x).detach(), Answer(y, torch.ones(classes))


WRONG = {
    "one": (
        lambda o, t: functional.cross_entropy(o, t) * 1,
        r"one number for the whole batch; .*reduction='none'",
    ),
    "wide": (
        lambda o, t: (o - t[:, None]) ** 2,
        r"returned float32 \[8, 3\]; return one float32 number",
    ),
    "hard": (lambda o, t: (o.argmax(1) != t).float(), "has no gradient .*remove detach, argmax"),
    "rounds": (lambda o, t: (o.round().mean(1) - t) ** 2, "has no gradient"),
    "mixes": (
        lambda o, t: (o - o.mean(0)).pow(2).mean(1) + t,
        "mixes samples: .*dimensions from 1 on",
    ),
    "spread": (
        lambda o, t: ((o[:, :1] - t) ** 2).mean(1),
        r"mixes samples: .*not with \[batch, 1\]",
    ),
    "cut": (lambda o, t: (o.sum() * t.sum()).item(), "returned float; return a tensor"),
    "fails": (
        lambda o, t: o.view(7, -1) + t,
        "fails at line .*RuntimeError: .*only PyTorch's tensor functions",
    ),
    "log": (
        lambda o, t: torch.log(o[:, 0] - 1) * t,
        "not finite for the initial model's outputs.*torch.clamp",
    ),
    "root": (
        lambda o, t: torch.sqrt((o - o.detach()).pow(2).sum(1)) + t,
        "gradient that is not finite; add a small",
    ),
    "turned": (
        lambda o, t: o.mean(0) + t[0],
        r"returned shape \[3\] for 8 samples; its first dimension",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loss_is_refused_with_function_line_and_remedy(name):
    """Before anything is traced."""
    function, message = WRONG[name]
    function.__name__ = name
    recipe = Recipe(loss=loss("int64")(function)())
    with pytest.raises(
        ExportError,
        match=rf"loss {name} \(line {function.__code__.co_firstlineno} of test_own_.*{message}",
    ):
        recipe.try_out(*batch_of(recipe))


WRONG_METRICS = {
    "total": (lambda o, t: (o.argmax(1) == t).sum(), "ratio", r"whole batch; .*\.sum\(1\)"),
    "few": (lambda o, t: o.argmax(1) == t, "f1", "returned 1 tensors; the rule f1 takes 3"),
    "column": (
        lambda o, t: o[:, :1] - t[:, None],
        "ratio",
        r"returned \[8, 1\], \[8, 1\]; return numbers of samples",
    ),
    "centred": (lambda o, t: (o - o.mean(0)).sum(1) * t, "ratio", "mixes samples"),
}


@pytest.mark.parametrize("name", WRONG_METRICS)
def test_a_wrong_metric_is_refused_with_function_line_and_remedy(name):
    """As a loss is, but for its gradient."""
    function, rule, message = WRONG_METRICS[name]
    function.__name__ = name
    recipe = Recipe(metrics=(metric(rule)(function)(),))
    with pytest.raises(
        ExportError, match=rf"metric {name} \(line \d+ of test_own_functions.py\) .*{message}"
    ):
        recipe.try_out(*batch_of(recipe))


@pytest.mark.slow
def test_what_cannot_be_traced_names_function_and_line(tmp_path):
    """A branch on values, and an operator that no graph has; both remedies hold."""

    @loss("int64")
    def branch(outputs, targets):
        if targets.sum() > -1:
            return outputs.mean(1).pow(2) + targets
        return outputs.mean(1)

    @loss("int64")
    def spectrum(outputs, targets):
        return torch.fft.fft(outputs).abs().mean(1) + targets

    @loss("int64")
    def mended(outputs, targets):
        return torch.where(targets.sum() > -1, outputs.mean(1).pow(2) + targets, outputs.mean(1))

    with pytest.raises(
        ExportError, match=r"loss branch .* fails at line \d+ .*torch\.where instead of branches"
    ):
        exported(tmp_path, "mlp", Recipe(loss=branch()))
    with pytest.raises(
        ExportError,
        match=r"^loss spectrum \(line .*\), line \d+ of test_own.*fft.*cannot be exported",
    ):
        exported(tmp_path, "mlp", Recipe(loss=spectrum()))
    _, manifest, _ = exported(tmp_path, "mlp", Recipe(loss=mended()))
    assert manifest.recipe.loss.name == "mended"


def test_what_is_no_function_of_outputs_and_targets_is_refused(tmp_path):
    """When the file is read, or the recipe made."""
    with pytest.raises(
        ConfigError, match=r"loss bare \(line .*must take outputs, targets.*but it takes 1"
    ):

        @loss()
        def bare(outputs):
            return outputs

    with pytest.raises(ConfigError, match="but the default of gamma is not a number"):

        @loss()
        def open_ended(outputs, targets, gamma):
            return outputs

    with pytest.raises(ConfigError, match="float32 or int64, not 'int32'"):
        loss("int32")
    with pytest.raises(ConfigError, match=r"unknown rule 'rato' of a metric .did you mean 'ratio'"):
        metric("rato")
    path = tmp_path / "mine.py"
    path.write_text(
        "from shoal import loss\n@loss()\ndef huber(outputs, targets):\n    return outputs[:, 0] "
        "- targets\n"
    )
    own = Registry.zoo().with_file(path).own
    with pytest.raises(ConfigError, match="your loss huber has the name of a built-in one; rename"):
        Recipe.from_table(RecipeTable.model_validate({"loss": "huber"}), own)
    with pytest.raises(
        ConfigError, match=r"the loss focal has no parameter 'gama' .did you mean 'gamma'"
    ):
        Recipe.from_table(
            RecipeTable.model_validate({"loss": {"name": "focal", "gama": 1}}), {"focal": focal}
        )


@loss({"label": "int64", "box": "float32"}, {"box": (2,)})
def both(outputs, targets, *, ignore=7):
    """Labels that PyTorch's own function takes, and numbers of any size."""
    named = functional.cross_entropy(
        outputs["label"], targets["label"], reduction="none", ignore_index=ignore
    )
    return named + (outputs["box"] - targets["box"]).abs().mean(1)


@loss("int64")
def any_sign(outputs, targets):
    """Hinge of labels -1 and 1."""
    return (1 - outputs[:, 0] * targets).clamp(min=0)


@loss("int64")
def gathered(outputs, targets):
    """A graph would take label -1 for the last class."""
    return -torch.log_softmax(outputs, 1).gather(1, targets[:, None])[:, 0]


@loss("int64")
def coded(outputs, targets):
    """PyTorch has no code of other labels."""
    return (outputs.softmax(1) - functional.one_hot(targets, 3)).pow(2).sum(1)


@loss("int64")
def looked_up(outputs, targets):
    """Where PyTorch counts from the end."""
    return (outputs.softmax(1) - torch.eye(3)[targets]).pow(2).sum(1)


def test_the_labels_that_a_function_takes_are_found_with_it():
    """The manifest states them, so that boards and server refuse others before anything is
    trained.
    """
    heads = {"label": torch.zeros(1, 5), "box": torch.zeros(1, 2)}
    assert both().spec((), heads).whole == {"label": (0, 4, 7)}
    assert gathered().spec((3,), torch.zeros(1, 3)).whole == {"": (0, 2)}
    assert coded().spec((3,), torch.zeros(1, 3)).whole == {"": (0, 2)}
    assert looked_up().spec((3,), torch.zeros(1, 3)).whole == {"": (-3, 2)}
    assert any_sign().spec((1,), torch.zeros(1, 1)).whole == {"": (-(2**24), 2**24)}


MARGINS = """
from torch.nn import functional
from shoal import loss

@loss("int64", (3,))
def margins(outputs, targets):
    return functional.multilabel_margin_loss(outputs, targets, reduction="none")
"""


@pytest.mark.slow
def test_the_list_of_a_samples_labels_ends_where_pytorch_ends_it(tmp_path):
    """What PyTorch takes its loss apart into goes on behind the -1; no check draws one, so another
    loss was trained.
    """
    path = tmp_path / "my_models.py"
    path.write_text(MARGINS)
    table = RecipeTable.model_validate({"loss": "margins", "clip_norm": 0})
    place, manifest, module = exported(
        tmp_path, "mlp", Recipe.from_table(table, ZOO.with_file(path).own)
    )
    session = evaluating(place, manifest, module)
    torch.manual_seed(5)
    for labels in ([0, 1, 0], [0, 2, -1], [1, -1, 0], [-1, 0, 1]):
        x = torch.randn(4, 1, 4, 4)
        y = torch.tensor([labels] * 4)
        with torch.no_grad():
            wanted = functional.multilabel_margin_loss(module(x), y, reduction="sum")
        found = session.evaluate(x.numpy(), y.float().numpy(), np.ones(3, np.float32))["loss_sum"]
        assert float(found) == pytest.approx(float(wanted), abs=1e-5)
