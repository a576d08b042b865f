"""Optimizers and losses are records: any number of states and any target train on a device as
PyTorch's own do.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from device_runtime.training.backends import TrainSession
from fleet_protocol.discovery import discover
from fleet_protocol.errors import ConfigError, ExportError
from fleet_protocol.manifest import parse_manifest
from models.architecture import build
from models.tier import Tier
from models.zoo.layers import set_mode
from tests.trainer_export.helpers import TINY, ZOO, tiny, train_report
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.batches import SizedBatches
from trainer_export.check import calm_torch
from trainer_export.formats import ort_training
from trainer_export.formats.onnx import check_graphs, write_graphs
from trainer_export.loss import LOSS_SUM, Answer, Loss, Target, loss_named
from trainer_export.losses.cross_entropy import MaskedCrossEntropy
from trainer_export.optimizer import optimizer_named
from trainer_export.optimizers.adam import Adam, AdamW
from trainer_export.optimizers.sgd import Sgd
from trainer_export.pair_step import trace_pair
from trainer_export.recipe import Recipe
from trainer_export.routines.mutual import MUTUAL

LEARNING_RATE = 0.01
STEPS = 20
CASES = [
    (Adam(), torch.optim.Adam, {}),
    (
        Adam(0.8, 0.99, 1e-6, 0.1),
        torch.optim.Adam,
        {"betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1},
    ),
    (AdamW(weight_decay=0.2), torch.optim.AdamW, {"weight_decay": 0.2}),
    (Sgd(0.9, 0.01), torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    (
        Sgd(0.8, 0.01, nesterov=True),
        torch.optim.SGD,
        {"momentum": 0.8, "weight_decay": 0.01, "nesterov": True},
    ),
]


@dataclass(frozen=True)
class MeanSquares(Loss):
    """The mean squared error of regression: its target is what the model returns, and its gradient
    is traced.
    """

    name: ClassVar[str] = "mean-squares"

    def target(self, output):
        return Target("float32", output)

    def value(self, output, answer):
        return torch.square(output - answer.y).mean()

    def sums(self, output, answer):
        return [torch.square(output - answer.y).mean(-1).sum()]

    def pytorch(self, output, answer):
        return nn.functional.mse_loss(output, answer.y)

    def pytorch_sums(self, output, answer):
        return [nn.functional.mse_loss(output, answer.y) * len(output)]


def published(folder, recipe):
    """A device's session of an exported model, its manifest, and PyTorch's copy of the model."""
    arch = ZOO.get("mlp")
    tier = Tier(1.0, 1)
    export_architecture(
        ExportRequest(arch, TINY["mlp"], [tier], recipe), folder, ExportOptions(formats=("onnx",))
    )
    place = folder / "mlp" / tier.id
    manifest = parse_manifest((place / "manifest.json").read_bytes())
    torch.manual_seed(0)
    module = set_mode(build(arch, tier, settings=TINY["mlp"]), "train")
    return TrainSession(manifest, place / manifest.graphs["onnx/train"].path), manifest, module


def trained(session, module, optimizer, batches, loss):
    """The largest difference of any parameter after some steps of both."""
    session.load({name: p.detach().numpy().copy() for name, p in module.named_parameters()})
    for x, y in batches:
        found = session.step(x.numpy(), y.numpy(), np.ones(3, np.float32), LEARNING_RATE)
        optimizer.zero_grad()
        expected = loss(module(x), y)
        expected.backward()
        optimizer.step()
        assert found == pytest.approx(expected.item(), rel=1e-4)
    now = session.parameters()
    return max(
        float(np.abs(now[name] - p.detach().numpy()).max()) for name, p in module.named_parameters()
    )


@pytest.mark.parametrize(
    ("optimizer", "pytorch", "settings"), CASES, ids=lambda case: getattr(case, "name", "")
)
def test_a_device_steps_as_pytorchs_own_optimizer(tmp_path, optimizer, pytorch, settings):
    """Twenty steps of any optimizer, then another task that begins with fresh states: within
    1e-5.
    """
    session, manifest, module = published(tmp_path, Recipe(optimizer, clip_norm=None))
    assert manifest.recipe.optimizer.name == optimizer.name
    assert manifest.states_in_place
    for _ in range(2):
        reference = pytorch(module.parameters(), lr=LEARNING_RATE, **settings)
        batches = list(SizedBatches(tiny("mlp")[1], sizes=(7,)).draw(STEPS))
        assert trained(session, module, reference, batches, nn.functional.cross_entropy) <= 1e-5


def test_states_are_named_in_the_manifest(tmp_path):
    """Two tensors like each parameter and one counter; SGD's only state is called as its
    parameter.
    """
    _, manifest, module = published(tmp_path, Recipe(Adam()))
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    expected = {
        f"{kind}.{name}": shape
        for kind in ("exp_avg", "exp_avg_sq")
        for name, shape in shapes.items()
    }
    assert {spec.name: spec.shape for spec in manifest.states} == expected | {"step": ()}
    assert [spec.name for spec in Sgd().state_specs(shapes)] == list(shapes)
    assert not Sgd(momentum=0.0).state_specs(shapes)


def test_a_loss_with_another_target_and_a_traced_gradient(tmp_path):
    """Regression: targets are numbers in the shape of the output, the graph takes no mask, Adam
    trains it.
    """
    session, manifest, module = published(tmp_path, Recipe(Adam(), MeanSquares(), clip_norm=None))
    assert (manifest.recipe.loss.target, manifest.label_shape, manifest.recipe.loss.metrics) == (
        "float32",
        (3,),
        ("loss_sum",),
    )
    assert "mask" not in {port.name for port in manifest.graphs["onnx/train"].inputs}
    batches = list(SizedBatches(tiny("mlp")[1], sizes=(7,), loss=MeanSquares()).draw(STEPS))
    reference = torch.optim.Adam(module.parameters(), lr=LEARNING_RATE)
    assert trained(session, module, reference, batches, nn.functional.mse_loss) <= 1e-5


@pytest.mark.ort_training
def test_the_other_format_takes_any_record():
    """Adam behind the gradient graph of onnxruntime-training, and a loss that it differentiates
    itself.
    """
    module, signature = tiny("mlp")
    for recipe in (Recipe(Adam()), Recipe(AdamW(), MeanSquares())):
        batches = SizedBatches(signature, sizes=(5, 1, 8), loss=recipe.loss)
        with calm_torch():
            reports = ort_training.check_artifacts(
                ort_training.write_artifacts(module, signature, recipe), module, recipe, batches
            )
        assert max(report.worst_absolute for report in reports) <= 1e-5


def test_a_wrong_rule_is_not_published():
    """The check holds a record against PyTorch's own optimizer: a rule that is not the same is
    refused.
    """

    @dataclass(frozen=True)
    class Halved(Adam):
        def direction(self, slot):
            direction, states = super().direction(slot)
            return direction / 2, states

    with pytest.raises(ExportError, match="differs from PyTorch"):
        train_report(*tiny("mlp"), Recipe(Halved()))


def test_a_wrong_loss_is_not_published():
    """So is a loss whose sums are not PyTorch's."""

    @dataclass(frozen=True)
    class Doubled(MeanSquares):
        def sums(self, output, answer):
            return [2 * total for total in super().sums(output, answer)]

    module, signature = tiny("mlp")
    recipe = Recipe(loss=Doubled())
    graphs = write_graphs(module, signature, recipe)
    with (
        calm_torch(),
        pytest.raises(ExportError, match="onnx/eval differs from PyTorch: loss_sum"),
    ):
        check_graphs(graphs, module, recipe, SizedBatches(signature, loss=recipe.loss))


def test_records_are_found_by_name():
    """A row in a module's table is all; a name that is not there is answered with those that
    are.
    """
    assert optimizer_named("sgd", {"momentum": 0.5}) == Sgd(momentum=0.5)
    assert optimizer_named("adamw") == AdamW()
    assert loss_named("masked-cross-entropy") == MaskedCrossEntropy()
    with pytest.raises(
        ConfigError,
        match=r"unknown optimizer 'adm' \(did you mean 'adam'\?\); choose from adam, adamw, sgd",
    ):
        optimizer_named("adm")
    with pytest.raises(
        ConfigError, match=r"adam has no parameter 'weigth_decay' \(did you mean 'weight_decay'\?\)"
    ):
        optimizer_named("adam", {"weigth_decay": 0.9})
    with pytest.raises(ConfigError, match=r"beta2 1 is outside \[0, 1\)"):
        optimizer_named("adam", {"beta2": 1})
    with pytest.raises(
        ConfigError, match="unknown loss 'hinge'; choose from all-exits-teach, binary-cross-entropy"
    ):
        loss_named("hinge")


def test_numbers_are_checked_with_their_range():
    """Both ends, and what is no number."""
    for broken in (-0.1, 1.0, float("nan")):
        with pytest.raises(ConfigError, match=r"is outside \[0, 1\)"):
            Sgd(momentum=broken)
    for broken in (0.0, float("inf")):
        with pytest.raises(ConfigError, match=r"clip_norm .* is outside \(0, inf\)"):
            Recipe(clip_norm=broken)
    assert Recipe(clip_norm=None).clip_norm is None


def test_a_pair_has_the_loss_of_its_routine():
    """A recipe with another one is refused."""
    module, signature = tiny("mlp")
    with pytest.raises(ConfigError, match="uses the loss of its routine, not mean-squares"):
        trace_pair(MUTUAL, (module, module), signature, Recipe(loss=MeanSquares()))


def test_the_cross_entropy_needs_a_mask():
    """All ones stand for none; leaving it out would be a fault of ours."""
    with pytest.raises(ValueError, match="needs a label mask"):
        MaskedCrossEntropy().value(torch.zeros(1, 2), Answer(torch.zeros(1, dtype=torch.int64)))


def test_every_loss_returns_its_sum_first():
    """What the evaluation of any model reads."""
    assert MaskedCrossEntropy.metrics[0] == MeanSquares.metrics[0] == LOSS_SUM


@pytest.mark.parametrize("name", sorted(discover("trainer_export.losses", "LOSSES")))
def test_a_loss_says_whether_whole_targets_are_numbers(name):
    """As the type of its target does, so that an export counts the outputs rightly."""
    loss = loss_named(name)
    assert loss.takes_numbers == (loss.target((3,)).dtype == "float32")
