"""FedProx: the proximal term in both formats, and on the device."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from device_runtime.training.backends import TrainSession
from fleet_protocol.errors import RefusedError
from fleet_protocol.manifest import parse_manifest
from models import Registry, build
from models.tier import Tier
from models.zoo.layers import set_mode
from tests.marking import mostly_slow
from tests.trainer_export.helpers import batches_for, deviation, tiny, train_report
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.check import calm_torch
from trainer_export.formats import ort_training
from trainer_export.formats.onnx import write_train_graph
from trainer_export.model_inputs import Signature
from trainer_export.optimizers.sgd import Sgd
from trainer_export.recipe import Recipe
from trainer_export.train_check import check_train

RECIPE = Recipe(Sgd(momentum=0.5, weight_decay=0.01), clip_norm=0.5, proximal=True)
SETTINGS = {"input_shape": (1, 4, 4), "classes": 3, "hidden": (8, 6)}


class WithIdle(nn.Module):
    """Has a parameter that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.idle = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


@pytest.mark.parametrize(
    "name", mostly_slow(["mlp", "conv", "next_word"], lambda name: name != "next_word")
)
@pytest.mark.parametrize(
    "recipe", [RECIPE, Recipe(Sgd(momentum=0.0, weight_decay=0.0), clip_norm=None, proximal=True)]
)
def test_train_graph_agrees_with_pytorch(name, recipe):
    """PyTorch differentiates the loss with `mu / 2` of the squared distance from the first weights,
    then clips.
    """
    assert deviation([train_report(*tiny(name, 0.5), recipe)]) <= 1e-5


def test_the_term_counts():
    """The comparison above would notice a graph without it."""
    module, signature = tiny("mlp")
    graph = write_train_graph(
        module, signature, Recipe(Sgd(momentum=0.5, weight_decay=0.01), clip_norm=0.5)
    )
    with calm_torch(), pytest.raises(Exception, match="differs from PyTorch"):
        check_train(graph.data, module, RECIPE, batches_for(module, signature))


def test_every_parameter_is_part_of_the_term():
    """A parameter outside the loss has a gradient now, so weight decay moves it as in PyTorch."""
    assert train_report(WithIdle(), Signature((6,), "float32", 3), RECIPE).worst_absolute <= 1e-5


def test_inputs_are_anchors_and_mu():
    """One anchor per parameter and the scalar mu; none without the term."""
    module, signature = tiny("mlp")
    parameters = [name for name, _ in module.named_parameters()]
    ports = {p.name: p.shape for p in write_train_graph(module, signature, RECIPE).inputs}
    assert [n for n in ports if n.startswith("anchor.")] == [
        f"anchor.{name}" for name in parameters
    ]
    assert ports["mu"] == ()
    plain = {p.name for p in write_train_graph(module, signature, Recipe()).inputs}
    assert not [n for n in plain if n.startswith("anchor.") or n == "mu"]


@pytest.mark.ort_training
def test_step_of_onnxruntime_training_agrees():
    """The optimizer behind the runtime's own gradient graph has the term too."""
    module, signature = tiny("conv", 0.5)
    files = ort_training.write_artifacts(module, signature, RECIPE)
    with calm_torch():
        reports = ort_training.check_artifacts(
            files, module, RECIPE, batches_for(module, signature)
        )
    assert deviation(reports) <= 1e-5


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    out = tmp_path_factory.mktemp("proximal")
    tier = Tier(1.0, 1)
    arch = Registry.zoo().get("mlp")
    sets = {}
    for proximal in (True, False):
        recipe = Recipe(Sgd(momentum=0.9, weight_decay=0.0), clip_norm=1.0, proximal=proximal)
        export_architecture(
            ExportRequest(arch, SETTINGS, [tier], recipe),
            out / str(proximal),
            ExportOptions(formats=("onnx",)),
        )
        folder = out / str(proximal) / "mlp" / tier.id
        sets[proximal] = folder, parse_manifest((folder / "manifest.json").read_bytes())
    torch.manual_seed(0)
    return sets, build(arch, tier, settings=SETTINGS)


def batch(step):
    draw = np.random.default_rng(step)
    return draw.normal(size=(7, 1, 4, 4)).astype(np.float32), draw.integers(0, 3, 7)


def test_a_device_is_pulled_towards_what_it_was_sent(exported):
    """Two tasks in one session: each is pulled towards its own weights, as PyTorch is; mu 0 is
    plain SGD.
    """
    sets, module = exported
    sessions = {
        proximal: TrainSession(manifest, folder / "train.onnx")
        for proximal, (folder, manifest) in sets.items()
    }
    assert sets[True][1].recipe.proximal
    mask = np.ones(3, np.float32)
    for mu, shift in ((0.7, 0.0), (0.2, 0.5), (0.0, 0.0)):
        own = set_mode(build(Registry.zoo().get("mlp"), Tier(1.0, 1), settings=SETTINGS), "train")
        own.load_state_dict({n: p + shift for n, p in module.state_dict().items()})
        sent = [p.detach().clone() for p in own.parameters()]
        start = {n: p.detach().numpy().copy() for n, p in own.named_parameters()}
        sessions[True].load(start, mu)
        sessions[False].load(start)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
        for step in range(5):
            x, y = batch(step)
            sessions[True].step(x, y, mask, 0.1)
            sessions[False].step(x, y, mask, 0.1)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(own(torch.from_numpy(x)), torch.from_numpy(y))
            pull = sum(((p - a) ** 2).sum() for p, a in zip(own.parameters(), sent, strict=True))
            (loss + mu / 2 * pull).backward()
            nn.utils.clip_grad_norm_(own.parameters(), 1.0)
            optimizer.step()
        far = 0.0
        for name, parameter in own.named_parameters():
            found = sessions[True].parameters()[name]
            np.testing.assert_allclose(found, parameter.detach().numpy(), atol=1e-5)
            far = max(far, np.abs(found - sessions[False].parameters()[name]).max())
        assert (far > 1e-3) == (mu > 0)


def test_a_set_without_the_term_refuses_mu(exported):
    """Training on without the pull would be another method under the same name."""
    sets, module = exported
    folder, manifest = sets[False]
    session = TrainSession(manifest, folder / "train.onnx")
    with pytest.raises(RefusedError, match=r"mlp w1\.00-d1 has no proximal term.* mu = 0\.1"):
        session.load({n: p.detach().numpy() for n, p in module.named_parameters()}, 0.1)
