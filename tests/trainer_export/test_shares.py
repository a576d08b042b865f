"""Tiers that train a share of their blocks: what their graphs take, return, keep and cost.

The export compares each with PyTorch, which trains with the same parameters frozen.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from broker_server.rounds.artifacts import Artifacts, load_artifacts
from device_runtime.training.backends import Sessions
from models import Registry, Tier, infer_layout
from models.shares import frozen_parameters
from models.tier import HEAD_SHARE
from tests.marking import mostly_slow
from tests.trainer_export.helpers import TINY
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.recipe import Recipe

SHARES = (1.0, 0.5, HEAD_SHARE)
DEEPER = (1.0, 1, 1 / 3, 1)
"""The middle one of three convolutions."""


@dataclass(frozen=True)
class Exported:
    """The sets of one model, by trained share."""

    artifacts: Artifacts
    depth: int

    def set_of(self, share):
        """The artifact set of a share."""
        return self.artifacts.tiers[self.artifacts.layout.tier(1.0, self.depth, share).id]

    def session(self, share):
        """A training session with the initial weights."""
        item = self.set_of(share)
        session = Sessions().train(item.manifest, item.folder / "train.onnx", item.base())
        session.load(self.artifacts.initial_weights())
        return session


def export(name, folder, recipe):
    """Export a small model of the zoo with every share."""
    arch = Registry.zoo().get(name)
    settings = arch.settings(TINY[name])
    layout = infer_layout(arch, settings)
    tiers = [layout.tier(1.0, None, share) for share in SHARES]
    if name == "conv":
        tiers.append(Tier(*DEEPER))
    export_architecture(
        ExportRequest(arch, settings, tiers, recipe), folder, ExportOptions(formats=("onnx",))
    )
    return Exported(load_artifacts(folder, name, chunk_bytes=1024), layout.depth)


@pytest.fixture(scope="module")
def conv(tmp_path_factory):
    """Three convolutions with static batch norm, with the proximal term and sums of gradients."""
    return export("conv", tmp_path_factory.mktemp("conv"), Recipe(proximal=True, accumulate=True))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Two layers of a Transformer, with Adam."""
    from trainer_export.optimizers.adam import Adam  # noqa: PLC0415

    return export("text_encoder", tmp_path_factory.mktemp("text"), Recipe(Adam()))


@pytest.fixture(scope="module")
def mlp(tmp_path_factory):
    """Two layers before the head."""
    return export("mlp", tmp_path_factory.mktemp("mlp"), Recipe())


@pytest.fixture(params=mostly_slow(["mlp", "conv", "text"], lambda name: name == "mlp"))
def exported(request):
    """All models in turn."""
    return request.getfixturevalue(request.param)


def test_nothing_exists_below_the_share(exported):
    """No state, anchor or new value of a parameter that is not trained: the graph only reads it."""
    for share in SHARES[1:]:
        item = exported.set_of(share)
        manifest = item.manifest
        frozen = frozen_parameters(exported.artifacts.layout, item.tier)
        assert manifest.frozen == frozen != ()
        train = manifest.graphs["onnx/train"]
        inputs = {port.name for port in train.inputs}
        outputs = {port.name for port in train.outputs}
        # An optimizer with one state for each parameter names it after the parameter.
        states = {spec.name for spec in manifest.states}
        states |= {name.partition(".")[2] for name in states}
        for spec in manifest.parameters:
            is_trained = spec.name not in frozen
            assert f"param.{spec.name}" in inputs
            assert (f"next.param.{spec.name}" in outputs) == is_trained
            assert (spec.name in states) == is_trained
            assert f"anchor.{spec.name}" not in inputs or is_trained


def test_a_smaller_share_costs_less(exported):
    """Memory and arithmetic of a step fall, those of a forward pass stay; its graphs are shared."""
    whole, half, head = (exported.set_of(share).manifest for share in SHARES)
    assert whole.peak_memory_bytes > half.peak_memory_bytes > head.peak_memory_bytes
    steps = [item.flops_per_step_sample for item in (whole, half, head)]
    assert steps[0] > steps[1] > steps[2] >= head.flops_per_sample
    assert whole.flops_per_sample == half.flops_per_sample == head.flops_per_sample
    for key in ("onnx/eval", "onnx/infer"):
        assert len({item.graphs[key].digest for item in (whole, half, head)}) == 1
    assert whole.frozen == ()
    assert b'"frozen"' not in whole.to_bytes()


@pytest.mark.parametrize("share", SHARES[1:])
def test_steps_move_what_is_trained_and_nothing_else(exported, share):
    """A parameter below keeps its bits through steps, and the session still names all of them."""
    manifest = exported.set_of(share).manifest
    session = exported.session(share)
    before = {name: value.copy() for name, value in session.parameters().items()}
    assert list(before) == [spec.name for spec in manifest.parameters]
    draw = np.random.default_rng(1)
    x = draw.normal(size=(6, *manifest.input_shape)).astype(np.float32)
    if manifest.input_dtype == "int64":
        x = draw.integers(0, 20, (6, *manifest.input_shape))
    y = np.arange(6) % manifest.classes
    for _ in range(3):
        session.step(x, y, np.ones(manifest.classes, np.float32), 0.05)
    moved = set()
    for name, value in session.parameters().items():
        if not np.array_equal(value, before[name]):
            moved.add(name)
    idle = {spec.name for spec in manifest.trained} - moved
    assert not moved & set(manifest.frozen)
    # A bias before a static batch norm has no gradient.
    assert all(name.endswith(".bias") for name in idle)
    assert "head.weight" in moved


@pytest.mark.slow
def test_a_window_below_the_top_trains_its_blocks(conv):
    """The gradient passes through the layers above, which keep their values, as do those below."""
    item = conv.artifacts.tiers[Tier(*DEEPER).id]
    trained = {spec.name.rpartition(".")[0] for spec in item.manifest.trained}
    assert trained == {"units.1.conv", "units.1.norm", "head"}
    session = Sessions().train(item.manifest, item.folder / "train.onnx", {})
    session.load(conv.artifacts.initial_weights())
    before = {name: value.copy() for name, value in session.parameters().items()}
    x = np.random.default_rng(1).normal(size=(6, *item.manifest.input_shape)).astype(np.float32)
    session.step(x, np.arange(6) % 5, np.ones(5, np.float32), 0.05)
    after = session.parameters()
    for name in ("units.1.conv.weight", "units.1.norm.weight", "head.weight"):
        assert not np.array_equal(after[name], before[name])
    for name in item.manifest.frozen:
        np.testing.assert_array_equal(after[name], before[name])
    top = conv.set_of(0.5).manifest
    assert item.manifest.graphs["onnx/eval"].digest == top.graphs["onnx/eval"].digest
    assert item.manifest.graphs["onnx/train"].digest != top.graphs["onnx/train"].digest


def test_what_is_held_still_may_be_below_the_share(mlp):
    """Private parts hold parameters still by name, also those that no step moves."""
    session = mlp.session(HEAD_SHARE)
    session.hold(list(session.parameters()))
    before = {name: value.copy() for name, value in session.parameters().items()}
    x = np.ones((4, *mlp.set_of(HEAD_SHARE).manifest.input_shape), np.float32)
    session.step(x, np.arange(4) % 3, np.ones(3, np.float32), 0.1)
    for name, value in session.parameters().items():
        np.testing.assert_array_equal(value, before[name])
