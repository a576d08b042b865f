"""Models with an exit at every depth: their losses, graphs, evaluation and refusals."""

import numpy as np
import pytest
import torch
from torch import Tensor

from device_runtime.predictions.predictor import _rows
from device_runtime.training.backends import ForwardSession, TrainSession
from fleet_protocol.errors import ConfigError, ExportError, RefusedError
from fleet_protocol.manifest import Manifest, parse_manifest
from fleet_protocol.metrics import evaluation_of
from models.registry import infer_layout
from models.tier import Tier
from tests.marking import mostly_slow
from tests.trainer_export.helpers import TINY, ZOO, deviation, tiny, train_report
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.check import open_session
from trainer_export.formats import ort_training
from trainer_export.formats.files import UnavailableError
from trainer_export.loss import Answer, Loss, loss_named
from trainer_export.losses.all_exits_teach import AllExitsTeach
from trainer_export.losses.last_exit_teaches import LastExitTeaches
from trainer_export.optimizers.sgd import Sgd
from trainer_export.recipe import Recipe

LIMIT = 1e-5
LOSSES = [
    AllExitsTeach(),
    AllExitsTeach(temperature=2.0),
    LastExitTeaches(),
    LastExitTeaches(temperature=1.0, distillation=2.0),
]
SGD = Sgd(momentum=0.0, weight_decay=0.0)


def logits_of(exits: int, shape: tuple[int, ...], seed: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(exits)]


def test_two_exits_by_hand():
    """Vector D1: loss and gradients of two samples, computed from the formulas with a pencil."""
    output = [
        torch.tensor([[1.0, 0.0, -1.0], [0.0, 0.5, 0.0]], dtype=torch.float64),
        torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, -1.0]], dtype=torch.float64),
    ]
    answer = Answer(torch.tensor([0, 2]), torch.ones(3, dtype=torch.float64))
    numbers = {"distillation": 0.5, "inner": 1.0}
    loss, slopes = AllExitsTeach().value_and_slope(
        output, Answer(answer.y, answer.mask, knobs=numbers)
    )
    assert loss.item() == pytest.approx(2.281804, abs=1e-6)
    first = [[-0.197816, 0.156920, 0.040896], [0.144369, 0.172587, -0.316956]]
    last = [[-0.076071, 0.018698, 0.057373], [0.115029, 0.385965, -0.500994]]
    np.testing.assert_allclose(slopes[0], first, atol=1e-6)
    np.testing.assert_allclose(slopes[1], last, atol=1e-6)

    numbers = {"distillation": 0.5, "inner": 0.25}
    answer = Answer(answer.y, answer.mask, knobs=numbers)
    loss, slopes = AllExitsTeach(temperature=2.0).value_and_slope(output, answer)
    assert loss.item() == pytest.approx(1.671913, abs=1e-6)
    np.testing.assert_allclose(slopes[0][0], [-0.076663, 0.078218, -0.001555], atol=1e-6)
    np.testing.assert_allclose(slopes[1][1], [0.123710, 0.390365, -0.514075], atol=1e-6)


@pytest.mark.parametrize("exits", [1, 2, 4])
@pytest.mark.parametrize("loss", LOSSES, ids=repr)
@pytest.mark.parametrize("places", [(), (6,), (3, 2)], ids=["sample", "token", "pixel"])
def test_closed_forms_are_autograds(loss: Loss, exits: int, places: tuple[int, ...]):
    """Loss and gradient of one label a sample, a token and a pixel, some ignored, one label
    masked: those that autograd has of PyTorch's own losses, pair by pair.
    """
    shape = (3, 5, *places) if len(places) == 2 else (3, *places, 5)
    output = [logits.requires_grad_() for logits in logits_of(exits, shape)]
    generator = torch.Generator().manual_seed(8)
    y = torch.randint(0, 5, (3, *places), generator=generator)
    if places:
        y = torch.where(torch.rand(y.shape, generator=generator) < 0.3, -1, y)
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    answer = Answer(y, mask, knobs={"distillation": 0.8, "inner": 0.4})
    expected = loss.pytorch(output, answer)
    gradients = torch.autograd.grad(expected, output)
    detached = [logits.detach() for logits in output]
    value, slopes = loss.value_and_slope(detached, answer)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(list(slopes), list(gradients))
    # What an engine differentiates by itself.
    traced = torch.autograd.grad(loss.value(output, answer), output)
    torch.testing.assert_close(list(traced), list(gradients))


@pytest.mark.parametrize(
    "loss",
    mostly_slow(
        [AllExitsTeach(), LastExitTeaches()], lambda loss: loss.name == "last-exit-teaches"
    ),
)
def test_the_exported_step_is_pytorchs(loss: Loss):
    """Six steps of a narrow tier of two depths, with other numbers than the initial ones: 1e-5
    beside autograd with both exits.
    """
    recipe = Recipe(loss=loss)
    module, signature = tiny("exit_resnet", 0.5, 2)
    assert list(signature.heads) == ["logits.0", "logits.1"]
    assert deviation([train_report(module, signature, recipe)]) <= LIMIT


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> dict[int, tuple[Manifest, str]]:
    """Sets of two depths, by depth: manifest and folder."""
    folder = tmp_path_factory.mktemp("exits")
    tiers = [Tier(1.0, depth) for depth in (1, 2)]
    settings = {**TINY["exit_resnet"], "channels": (4, 6), "blocks": (1, 1)}
    recipe = Recipe(SGD, AllExitsTeach(), None)
    request = ExportRequest(ZOO.get("exit_resnet"), settings, tiers, recipe)
    export_architecture(request, folder, ExportOptions(formats=("onnx",)))
    sets = {}
    for tier in tiers:
        path = folder / "exit_resnet" / tier.id
        sets[tier.depth] = (parse_manifest((path / "manifest.json").read_bytes()), path)
    return sets


def test_a_tier_has_the_exits_up_to_its_depth(exported):
    """Parameters, outputs and figures; the numbers of the loss are in its manifest. Each graph
    agrees with PyTorch to 1e-5.
    """
    for depth, (manifest, _) in exported.items():
        assert deviation(manifest.checks) <= LIMIT
        names = [spec.name.split(".") for spec in manifest.parameters]
        numbers = {name[1] for name in names if name[0] == "exits"}
        assert numbers == {str(number) for number in range(depth)}
        outputs = [port.name for port in manifest.graphs["onnx/infer"].outputs]
        assert outputs == [f"logits.{number}" for number in range(depth)]
        figures = [figure.name for figure in manifest.recipe.loss.figures]
        assert figures == [f"exit{number}" for number in range(1, depth + 1)]
        assert manifest.recipe.loss.knobs == {"distillation": 1.0, "inner": 1.0}
    layout = infer_layout(ZOO.get("exit_resnet"), TINY["exit_resnet"])
    blocks = {parameter.name: parameter.block for parameter in layout.parameters}
    assert blocks["conv1.weight"] == "stem"
    assert blocks["exits.1.head.weight"] == "block2"


def batch_of(manifest: Manifest, count: int = 7):
    draw = np.random.default_rng(2)
    x = draw.standard_normal((count, *manifest.input_shape)).astype(np.float32)
    y = draw.integers(0, manifest.classes, count)
    return x, y, np.ones(manifest.classes, np.float32)


def drawn_weights(manifest: Manifest) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(3)
    return {
        spec.name: (0.4 * draw.standard_normal(spec.shape)).astype(np.float32)
        for spec in manifest.parameters
    }


def test_an_evaluation_has_the_answer_and_each_exit(exported):
    """Accuracy is that of the mean of the exits' logits; each exit's is a figure beside it."""
    manifest, folder = exported[2]
    weights = drawn_weights(manifest)
    x, y, mask = batch_of(manifest, 40)
    statistics = {}
    for spec in manifest.statistics:
        statistics[f"stat.{spec.name}.mean"] = np.zeros(spec.channels, np.float32)
        statistics[f"stat.{spec.name}.var"] = np.ones(spec.channels, np.float32)
    session = ForwardSession(manifest, folder / "eval.onnx", weights)
    evaluation = evaluation_of(session.evaluate(x, y, mask, statistics), len(y), manifest.recipe)
    infer = open_session((folder / "infer.onnx").read_bytes())
    feeds = {f"param.{name}": value for name, value in weights.items()} | statistics
    outputs = infer.run(None, {"x": x, **feeds})
    expected = [float((logits.argmax(1) == y).mean()) for logits in outputs]
    assert [metric.value for metric in evaluation.metrics] == pytest.approx(expected)
    assert len(set(expected)) > 1
    ensemble = np.mean(outputs, 0)
    assert evaluation.accuracy == pytest.approx(float((ensemble.argmax(1) == y).mean()))
    logs = ensemble - np.log(np.exp(ensemble).sum(1, keepdims=True))
    assert evaluation.loss == pytest.approx(float(-logs[np.arange(len(y)), y].mean()), rel=1e-5)


def test_a_task_sets_the_numbers_of_the_loss(exported):
    """With all of them 0, only the last exit and what lies below it move; by default all do."""
    manifest, folder = exported[2]
    session = TrainSession(manifest, folder / "train.onnx")
    weights = drawn_weights(manifest)
    batch = batch_of(manifest)

    def stepped(numbers: dict[str, float] | None) -> set[str]:
        session.load(weights)
        session.turn_knobs(numbers)
        session.step(*batch, 0.1)
        after = session.parameters()
        return {name for name, value in weights.items() if not np.array_equal(value, after[name])}

    inner = {name for name in weights if name.startswith("exits.0.")}
    assert inner <= stepped(None)
    moved = stepped({"distillation": 0.0, "inner": 0.0})
    assert "exits.1.head.weight" in moved
    assert not inner & moved
    assert inner <= stepped({"distillation": 0.3, "inner": 0.0})
    with pytest.raises(RefusedError, match="has no parameter 'alpha'"):
        session.turn_knobs({"alpha": 1.0})


def test_models_that_do_not_fit_the_loss_are_refused():
    with pytest.raises(ExportError, match="all-exits-teach needs a model with exits"):
        AllExitsTeach().require_outputs({})
    with pytest.raises(ExportError, match="at most 24 exits with logits of one shape"):
        AllExitsTeach().require_outputs({"logits.0": (3,), "logits.1": (4,)})
    with pytest.raises(ConfigError, match=r"one logit.*return only the last exit.*mean-squared"):
        AllExitsTeach().target((1,))
    with pytest.raises(ExportError, match="but masked-cross-entropy uses only one"):
        loss_named("cross-entropy").require_outputs({"logits.0": (3,), "logits.1": (3,)})


def test_a_runtime_that_differentiates_by_itself_gets_no_files():
    """It would also move an exit towards those that it teaches."""
    module, signature = tiny("exit_resnet", 0.5, 2)
    with pytest.raises(UnavailableError, match="treats a part of the outputs as constant"):
        ort_training.write_artifacts(module, signature, Recipe(loss=AllExitsTeach()))


def test_a_board_predicts_by_the_answer_of_all_exits(exported):
    """The label is that of the mean of the logits; of heads that answer other questions, none."""
    manifest, _ = exported[2]
    logits = np.array([[3.0, 0.0, 0.0, 0.0]], np.float32)
    outputs = {"logits.0": logits, "logits.1": np.array([[0.0, 8.0, 0.0, 0.0]], np.float32)}
    (row,) = _rows(manifest, outputs)
    assert row["label"] == 1
    assert row["share"] == pytest.approx(float(np.exp(4) / (np.exp(4) + np.exp(1.5) + 2)))
    loss = manifest.recipe.loss.model_copy(update={"answer": ()})
    recipe = manifest.recipe.model_copy(update={"loss": loss})
    assert "label" not in _rows(manifest.model_copy(update={"recipe": recipe}), outputs)[0]


def test_an_export_with_the_loss_of_one_output_names_the_loss_of_exits(tmp_path):
    """The default loss cannot use a list; the error says so before anything reads its values."""
    settings = {**TINY["exit_resnet"], "channels": (4, 6), "blocks": (1, 1)}
    request = ExportRequest(ZOO.get("exit_resnet"), settings, [Tier(1.0, 2)], Recipe())
    with pytest.raises(ExportError, match=r"returns 2 outputs .*--loss all-exits-teach"):
        export_architecture(request, tmp_path, ExportOptions(formats=("onnx",)))
