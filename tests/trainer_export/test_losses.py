"""Every loss, on three small models: graphs and twenty steps as PyTorch's own class, metrics as by
hand.
"""

import numpy as np
import pytest
import torch
from torch import nn

from device_runtime.training.backends import ForwardSession
from fleet_protocol.errors import ConfigError
from fleet_protocol.manifest import next_name, parameter_input, parse_manifest, state_input
from fleet_protocol.metrics import evaluation_of
from fleet_protocol.recipe import RecipeTable
from models.architecture import architecture, build
from models.registry import infer_layout
from models.tier import Tier
from models.zoo.layers import set_mode
from models.zoo.randomized_model import vocabulary_of
from tests.marking import mostly_slow
from tests.trainer_export.helpers import ZOO
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.batches import SizedBatches
from trainer_export.check import open_session, run_session
from trainer_export.formats.onnx import write_train_graph
from trainer_export.loss import loss_named
from trainer_export.losses.own import loss as own_loss
from trainer_export.metric import metric_named
from trainer_export.model_inputs import Signature
from trainer_export.optimizers.sgd import Sgd
from trainer_export.recipe import Recipe

LEARNING_RATE = 0.01
STEPS = 20


@architecture()
def pixels(cut, input_shape=(2, 6, 5), classes=3, channels=6):
    """Logits for each pixel, classes first."""
    hidden = cut.width("hidden", channels)
    return nn.Sequential(
        nn.Conv2d(input_shape[0], hidden, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(hidden, cut.classes(classes), 3, padding=1),
    )


@architecture(input_dtype="int64")
def words(cut, input_shape=(6,), classes=3, vocab=11, embed=8):
    """A label for each token."""
    hidden = cut.width("hidden", embed)
    return nn.Sequential(
        nn.Embedding(vocab, hidden),
        nn.Linear(hidden, hidden),
        nn.GELU(),
        nn.LayerNorm(hidden),
        nn.Linear(hidden, cut.classes(classes)),
    )


MODELS = {
    "mlp": (ZOO.get("mlp"), {"input_shape": (1, 4, 4), "classes": 3, "hidden": (8, 6)}),
    "one": (ZOO.get("mlp"), {"input_shape": (1, 4, 4), "classes": 1, "hidden": (8, 6)}),
    "next_word": (
        ZOO.get("next_word"),
        {
            "input_shape": (6,),
            "classes": 3,
            "embed": 32,
            "heads": 2,
            "head_dim": 4,
            "ffn": 12,
            "blocks": 1,
            "dropout": 0.0,
        },
    ),
    "pixels": (pixels, {}),
    "words": (words, {}),
}
WEIGHTS = (0.5, 2.0, 1.5)
ALL = ("mlp", "next_word", "pixels")


def ignoring(**numbers):
    """PyTorch's cross entropy over flattened places, to which every negative label or 1 is the one
    to be ignored.
    """
    ignored = numbers.pop("ignore_label", None)
    loss = nn.CrossEntropyLoss(ignore_index=-100, **numbers)

    def of(output, y):
        classes = output.movedim(1, -1) if output.dim() == 4 else output
        return loss(
            classes.flatten(0, -2), torch.where((y < 0) | (y == ignored), -100, y).flatten()
        )

    return of


def whole(loss):
    return lambda output, y: loss(output, y.reshape(output.shape))


@own_loss("int64")
def own_cross_entropy(outputs, targets, *, smoothing=0.0):
    """As a user would write it."""
    return nn.functional.cross_entropy(
        outputs, targets, reduction="none", label_smoothing=smoothing
    )


@own_loss(shape=(3,))
def own_square(outputs, targets):
    """With operators alone."""
    return ((outputs - targets) ** 2).mean(1)


OWN = {kind.name: kind for kind in (own_cross_entropy, own_square)}

CASES = [
    ("own_cross_entropy", {}, lambda output, y: nn.CrossEntropyLoss()(output, y.long()), ("mlp",)),
    (
        "own_cross_entropy",
        {"smoothing": 0.1},
        lambda output, y: nn.CrossEntropyLoss(label_smoothing=0.1)(output, y.long()),
        ("mlp",),
    ),
    ("own_square", {}, nn.MSELoss(), ("mlp",)),
    ("cross-entropy", {"label_smoothing": 0.1}, ignoring(label_smoothing=0.1), ALL),
    ("cross-entropy", {"class_weights": WEIGHTS}, ignoring(weight=torch.tensor(WEIGHTS)), ALL),
    ("cross-entropy", {"ignore_label": 1}, ignoring(ignore_label=1), ALL),
    (
        "cross-entropy",
        {"label_smoothing": 0.2, "class_weights": WEIGHTS, "ignore_label": 0},
        ignoring(label_smoothing=0.2, weight=torch.tensor(WEIGHTS), ignore_label=0),
        ALL,
    ),
    ("cross-entropy", {}, ignoring(), ALL),
    ("binary-cross-entropy", {}, whole(nn.BCEWithLogitsLoss()), ("mlp", "one", "pixels")),
    ("mean-squared-error", {}, whole(nn.MSELoss()), ("mlp", "one", "pixels")),
    ("mean-absolute-error", {}, whole(nn.L1Loss()), ("mlp", "one", "pixels")),
    ("huber", {"delta": 0.5}, whole(nn.HuberLoss(delta=0.5)), ("mlp", "one", "pixels")),
]
GRID = [
    (name, numbers, pytorch, model) for name, numbers, pytorch, models in CASES for model in models
]

NAMES = [f"{name}-{'-'.join(numbers) or 'plain'}-{model}" for name, numbers, _, model in GRID]


def made(model):
    """A module in mode train, and what it takes and returns."""
    arch, settings = MODELS[model]
    settings = arch.settings(settings)
    torch.manual_seed(0)
    module = set_mode(build(arch, Tier(1.0, 1), settings=settings), "train")
    return module, Signature(
        settings["input_shape"], arch.input_dtype, settings["classes"]
    ).with_places_of(module)


def exported(folder, model, recipe):
    """Where an exported model lies, its manifest, and PyTorch's copy of it."""
    arch, settings = MODELS[model]
    settings = arch.settings(settings)
    export_architecture(
        ExportRequest(arch, settings, [Tier(1.0, 1)], recipe),
        folder,
        ExportOptions(formats=("onnx",)),
    )
    place = folder / arch.name / "w1.00-d1"
    return place, parse_manifest((place / "manifest.json").read_bytes()), made(model)[0]


@pytest.mark.parametrize(
    ("loss", "numbers", "pytorch", "model"),
    mostly_slow(GRID, lambda case: case[3] == "mlp" and not case[1]),
    ids=[f"{g[0]}-{g[3]}-{len(g[1])}" for g in GRID],
)
def test_twenty_steps_are_those_of_pytorchs_own_class(loss, numbers, pytorch, model):
    """Within 1e-5 in loss and parameters."""
    module, signature = made(model)
    recipe = Recipe(Sgd(), loss_named(loss, numbers, OWN), clip_norm=None)
    session = open_session(write_train_graph(module, signature, recipe).data)
    ignored = recipe.loss.ignored
    optimizer = recipe.optimizer
    reference = optimizer.pytorch(list(module.parameters()), LEARNING_RATE)
    now = {
        parameter_input(name): p.detach().numpy().copy() for name, p in module.named_parameters()
    }
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    now |= {
        state_input(s.name): np.full(s.shape, s.initial, np.float32)
        for s in optimizer.state_specs(shapes)
    }
    fixed = {
        "mask": np.ones(signature.classes, np.float32),
        "lr": np.array(LEARNING_RATE, np.float32),
    }
    for x, y in SizedBatches(signature, vocabulary_of(module), (7,), loss=recipe.loss).draw(STEPS):
        taken = y if ignored is None else torch.where(y == ignored, -1, y)  # as boards hand it over
        found = run_session(session, {**now, **fixed, "x": x.numpy(), "y": taken.numpy()})
        reference.zero_grad()
        expected = pytorch(module(x), y)
        expected.backward()
        reference.step()
        assert found["loss"] == pytest.approx(expected.item(), abs=1e-5)
        now = {name: found[next_name(name)] for name in now}
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(
            now[parameter_input(name)], parameter.detach().numpy(), rtol=0, atol=1e-5
        )


def evaluating(place, manifest, module):
    """A device's session of the eval graph."""
    parameters = {name: p.detach().numpy() for name, p in module.named_parameters()}
    return ForwardSession(manifest, place / manifest.graphs["onnx/eval"].path, parameters)


def test_metrics_of_classes_are_those_by_hand(tmp_path):
    """F1, intersection over union and correlation over three batches, from the confusion of all of
    them.
    """
    metrics = tuple(metric_named(name) for name in ("f1", "mean-iou", "matthews", "perplexity"))
    place, manifest, module = exported(tmp_path, "pixels", Recipe(metrics=metrics))
    signature = Signature(
        manifest.input_shape, manifest.input_dtype, manifest.classes
    ).with_places_of(module)
    session = evaluating(place, manifest, module)
    confusion = np.zeros((3, 3))
    losses = []
    sums = {}
    for x, y in SizedBatches(signature, vocabulary_of(module), (9, 4)).draw(3):
        for name, value in session.evaluate(x.numpy(), y.numpy(), np.ones(3, np.float32)).items():
            sums[name] = sums.get(name, 0) + value
        with torch.no_grad():
            logits = module(x).movedim(1, -1)
        counts = y >= 0
        np.add.at(confusion, (y[counts].numpy(), logits.argmax(-1)[counts].numpy()), 1)
        losses += nn.functional.cross_entropy(logits[counts], y[counts], reduction="none").tolist()
    found = evaluation_of(sums, int(confusion.sum()), manifest.recipe)
    hit = np.diag(confusion)
    present = confusion.sum(1)
    predicted = confusion.sum(0)
    total = confusion.sum()
    spread = (total**2 - (predicted**2).sum()) * (total**2 - (present**2).sum())
    expected = {
        "f1": (2 * hit / (present + predicted)).mean(),
        "mean-iou": (hit / (present + predicted - hit)).mean(),
        "matthews": (hit.sum() * total - predicted @ present) / np.sqrt(spread),
        "perplexity": np.exp(np.mean(losses)),
    }
    assert {metric.name: metric.value for metric in found.metrics} == pytest.approx(
        expected, abs=1e-5
    )
    assert found.accuracy == pytest.approx(hit.sum() / total)


def test_metrics_of_numbers_are_those_by_hand(tmp_path):
    """MAE and RMSE over batches of different sizes; there is no accuracy."""
    recipe = Recipe(loss=loss_named("huber"), metrics=(metric_named("mae"), metric_named("rmse")))
    place, manifest, module = exported(tmp_path, "one", recipe)
    assert manifest.label_shape == ()
    signature = Signature(
        manifest.input_shape, manifest.input_dtype, manifest.classes
    ).with_places_of(module)
    session = evaluating(place, manifest, module)
    sums = {}
    errors = []
    for x, y in SizedBatches(signature, sizes=(9, 4), loss=recipe.loss).draw(3):
        for name, value in session.evaluate(x.numpy(), y.numpy(), np.ones(1, np.float32)).items():
            sums[name] = sums.get(name, 0) + value
        errors += (module(x)[:, 0] - y).tolist()
    found = evaluation_of(sums, len(errors), manifest.recipe)
    expected = {"mae": np.abs(errors).mean(), "rmse": np.sqrt(np.square(errors).mean())}
    assert {metric.name: metric.value for metric in found.metrics} == pytest.approx(
        expected, abs=1e-5
    )
    assert found.accuracy is None


def test_what_cannot_be_learnt_is_refused(tmp_path):
    """A cross entropy of one logit is always 0; weights must be as many as classes; metrics go with
    their losses.
    """
    with pytest.raises(
        ConfigError, match=r"cross entropy of one logit is always 0.*mean-squared-error"
    ):
        exported(tmp_path, "one", Recipe())
    with pytest.raises(ConfigError, match="2 numbers, but the model has 3 classes"):
        exported(
            tmp_path, "mlp", Recipe(loss=loss_named("cross-entropy", {"class_weights": [1, 2]}))
        )
    with pytest.raises(ConfigError, match="counts classes"):
        Recipe(loss=loss_named("huber"), metrics=(metric_named("f1"),))
    with pytest.raises(ConfigError, match="needs a loss for numbers"):
        Recipe(metrics=(metric_named("mae"),))
    with pytest.raises(ConfigError, match=r"unknown metric 'mean-iuo' .did you mean 'mean-iou'"):
        metric_named("mean-iuo")


def test_a_loss_of_numbers_needs_no_classes(tmp_path):
    """A loss of labels does, which have an axis then."""

    @architecture()
    def three(cut, *, input_shape=(6,)):
        kept = cut.width("hidden", 8)
        return nn.Sequential(nn.Linear(*input_shape, kept), nn.ReLU(), nn.Linear(kept, 3))

    layout = infer_layout(three)
    tiers = (layout.tier(1.0), layout.tier(0.5))
    recipe = Recipe(loss=loss_named("mean-squared-error"), metrics=(metric_named("mae"),))
    export_architecture(
        ExportRequest(three, None, tiers, recipe),
        tmp_path / "numbers",
        ExportOptions(formats=("onnx",)),
    )
    for tier in tiers:
        path = tmp_path / "numbers" / "three" / tier.id / "manifest.json"
        manifest = parse_manifest(path.read_bytes())
        assert (manifest.classes, manifest.label_shape) == (3, (3,))
    with pytest.raises(
        ConfigError, match=r"three does not use cut.classes\(n\), which the loss .* needs"
    ):
        export_architecture(
            ExportRequest(three, None, tiers, Recipe()),
            tmp_path / "labels",
            ExportOptions(formats=("onnx",)),
        )


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"loss": {"name": "cross-entropy", "class_weights": 2.0}},
            "class_weights .* is 2.0, not a list of numbers",
        ),
        ({"loss": {"name": "cross-entropy", "class_weights": ["1", 2]}}, "not a list of numbers"),
        (
            {"loss": {"name": "cross-entropy", "ignore_label": "x"}},
            "ignore_label .* is 'x', not a number",
        ),
        (
            {"loss": {"name": "cross-entropy", "ignore_label": 1.5}},
            "ignore_label 1.5 is not a label",
        ),
        (
            {"loss": {"name": "own_cross_entropy", "smoothing": "0.1"}},
            "smoothing .* is '0.1', not a number",
        ),
        (
            {"optimizer": {"name": "sgd", "nesterov": "no"}},
            "nesterov of the optimizer sgd is 'no', not true or false",
        ),
        ({"optimizer": {"name": "adam", "eps": True}}, "eps .* is True, not a number"),
    ],
)
def test_a_setting_of_another_kind_is_refused(table, message):
    """A text that says no would have been true."""
    with pytest.raises(ConfigError, match=message):
        Recipe.from_table(RecipeTable.model_validate(table), OWN)


@pytest.mark.parametrize(
    ("last", "warned"),
    [(nn.Softmax(-1), True), (nn.LogSoftmax(-1), False), (nn.Identity(), False)],
)
def test_a_softmax_before_a_cross_entropy_is_warned_of(last, warned, tmp_path, caplog):
    """The loss applies softmax itself; logits and their logarithms are right."""

    @architecture()
    def ending(cut, *, input_shape=(6,), classes=3):
        return nn.Sequential(nn.Linear(*input_shape, cut.classes(classes)), last)

    layout = infer_layout(ending)
    export_architecture(
        ExportRequest(ending, None, (layout.tier(1.0),), Recipe()),
        tmp_path,
        ExportOptions(formats=("onnx",)),
    )
    warnings = [message for message in caplog.messages if "returns probabilities" in message]
    assert bool(warnings) == warned
    assert all("return the logits, without the softmax" in message for message in warnings)
