"""The frozen base: one file for all tiers and graphs, read where it is mapped, and never returned
by any graph.
"""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from broker_server.rounds.artifacts import load_artifacts
from broker_server.rounds.evaluation import Evaluator
from device_runtime.training.backends import Sessions
from device_runtime.training.task import DeviceSetup, Task, base_tensors
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.data import make_dataset
from fleet_protocol.errors import RefusedError
from fleet_protocol.manifest import BASE as FILE
from fleet_protocol.manifest import Manifest
from fleet_protocol.mapped_tensors import open_tensors
from fleet_protocol.weights import encode_weights
from models import build, infer_layout, make_plan, slice_weights
from tests.adapted import BASE, adapted, encoding, half_frozen
from tests.marking import mostly_slow
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.loss import Answer
from trainer_export.recipe import Recipe
from trainer_export.reference import LEARNING_RATE, Reference

WIDTHS = (1.0, 0.5, 0.25)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Three tiers of a model with adapters."""
    out = tmp_path_factory.mktemp("adapted")
    layout = infer_layout(adapted)
    export_architecture(
        ExportRequest(adapted, None, [layout.tier(width) for width in WIDTHS], Recipe()),
        out,
        ExportOptions(formats=("onnx",)),
    )
    return load_artifacts(out, "adapted", chunk_bytes=1024), out


@pytest.mark.slow
def test_all_tiers_name_one_file_and_no_graph_returns_it(exported):
    """One content on disk under every tier's name; frozen tensors go into graphs and come out of
    none.
    """
    artifacts, _ = exported
    sets = artifacts.tiers.values()
    assert len({item.manifest.files[FILE].digest for item in sets}) == 1
    assert len({(item.folder / "base.safetensors").stat().st_ino for item in sets}) == 1
    for item in sets:
        manifest = item.manifest
        assert tuple(spec.name for spec in manifest.base) == BASE
        assert not set(BASE) & {spec.name for spec in (*manifest.parameters, *manifest.states)}
        train = manifest.graphs["onnx/train"]
        assert {f"param.{name}" for name in BASE} <= {port.name for port in train.inputs}
        assert not {f"next.param.{name}" for name in BASE} & {port.name for port in train.outputs}
    assert set(artifacts.initial_weights()) == {item.name for item in artifacts.layout.parameters}


@pytest.mark.parametrize("width", mostly_slow(WIDTHS, lambda width: width == 0.5))
def test_a_board_trains_on_the_mapped_file_as_pytorch_does(exported, width):
    """Steps with the base read where it is mapped, compared with PyTorch; the runtime is given the
    mapping itself.
    """
    artifacts, _ = exported
    item = artifacts.tiers[artifacts.layout.tier(width).id]
    base = open_tensors(item.folder / "base.safetensors")
    session = Sessions().train(item.manifest, item.folder / "train.onnx", base)
    module = build(adapted, width)
    with torch.no_grad():
        for name, value in base.items():
            module.get_parameter(name).copy_(torch.tensor(value))
    torch.nn.init.normal_(module.get_submodule("1").up, std=0.1)
    reference = Reference(module, Recipe(), base=BASE)
    session.load(reference.snapshot()[0])
    for seed in range(4):
        x = torch.randn(5, 1, 8, 8, generator=torch.manual_seed(seed))
        y = torch.arange(5) % 10
        loss = session.step(x.numpy(), y.numpy(), np.ones(10, np.float32), LEARNING_RATE)
        assert loss == pytest.approx(float(reference.step(x, Answer(y, torch.ones(10)))), rel=1e-5)
    for name, value in reference.snapshot()[0].items():
        np.testing.assert_allclose(session.parameters()[name], value, rtol=1e-4, atol=1e-6)
    addresses = session.addresses()
    assert {name: addresses[f"param.{name}"] for name in BASE} == {
        name: base[name].ctypes.data for name in BASE
    }


@pytest.mark.slow
def test_adapters_in_pytorchs_encoder_train(tmp_path):
    """The graph was right and refused, since PyTorch judged its own encoder past the adapters."""
    layout = infer_layout(encoding)
    export_architecture(
        ExportRequest(encoding, None, [layout.tier(1.0)], Recipe()),
        tmp_path,
        ExportOptions(formats=("onnx",)),
    )
    artifacts = load_artifacts(tmp_path, "encoding", chunk_bytes=1024)
    item = artifacts.full
    session = Sessions().train(item.manifest, item.folder / "train.onnx", item.base())
    session.load(artifacts.initial_weights())
    x = np.random.default_rng(0).normal(size=(8, 5, 8)).astype(np.float32)
    y = np.arange(8) % 4
    losses = [session.step(x, y, np.ones(4, np.float32), 0.1) for _ in range(9)]
    assert losses[-1] < losses[0]
    assert np.abs(session.parameters()["layer.linear1.up"]).min() > 0


@pytest.fixture(scope="module")
def cut_exported(tmp_path_factory):
    """Two tiers of a model with a frozen layer that a width cuts."""
    out = tmp_path_factory.mktemp("half_frozen")
    layout = infer_layout(half_frozen)
    export_architecture(
        ExportRequest(half_frozen, None, [layout.tier(1.0), layout.tier(0.5)], Recipe()),
        out,
        ExportOptions(formats=("onnx",)),
    )
    return load_artifacts(out, "half_frozen", chunk_bytes=1024)


def test_a_width_that_cuts_frozen_tensors_leaves_each_tier_its_leading_units(cut_exported):
    """On disk, once; what travels in a round is what trains, and a narrow board trains as PyTorch
    with that slice.
    """
    artifacts = cut_exported
    layout = artifacts.layout
    tier = artifacts.layout.tier(0.5)
    item = artifacts.tiers[tier.id]
    whole = artifacts.full.base()
    base = item.base()
    assert set(base) == {"1.weight", "1.bias"}
    assert all(np.array_equal(value, whole[name][:24]) for name, value in base.items())
    sent = slice_weights(layout, make_plan(layout, tier), artifacts.initial_weights())
    assert not set(base) & {
        *sent,
        *(spec.name for spec in (*item.manifest.parameters, *item.manifest.states)),
    }
    assert sum(value.nbytes for value in sent.values()) == 4 * (12 * 24 + 12 + 10 * 12 + 10)
    module = build(half_frozen, 0.5)
    module.load_state_dict({name: torch.tensor(value) for name, value in {**base, **sent}.items()})
    session = Sessions().train(item.manifest, item.folder / "train.onnx", base)
    session.load(sent)
    reference = Reference(module, Recipe(), base=tuple(base))
    for seed in range(3):
        x = torch.randn(5, 1, 8, 8, generator=torch.manual_seed(seed))
        y = torch.arange(5) % 10
        loss = session.step(x.numpy(), y.numpy(), np.ones(10, np.float32), LEARNING_RATE)
        assert loss == pytest.approx(float(reference.step(x, Answer(y, torch.ones(10)))), rel=1e-5)
    for name, value in reference.snapshot()[0].items():
        np.testing.assert_allclose(session.parameters()[name], value, rtol=1e-4, atol=1e-6)


def test_a_server_judges_with_the_base(exported):
    """The loss of a version is that of PyTorch with the frozen tensors of the export, not of
    others.
    """
    artifacts, _ = exported
    weights = artifacts.initial_weights()
    full = artifacts.full
    x = torch.randn(20, 1, 8, 8, generator=torch.manual_seed(1))
    y = torch.arange(20) % 10
    samples = make_dataset("noise", x.numpy(), y.numpy())
    found = Evaluator(full, samples, batch_size=8, threads=1).evaluate(weights, {})
    module = build(adapted)
    state = {**weights, **open_tensors(full.folder / "base.safetensors")}
    module.load_state_dict({name: torch.tensor(value) for name, value in state.items()})
    assert found.loss == pytest.approx(
        float(torch.nn.functional.cross_entropy(module(x), y).detach()), rel=1e-5
    )


def test_a_base_that_does_not_fit_is_refused_before_anything_runs(exported, tmp_path):
    """A file without a tensor, or with one of another shape, is named with what to do."""
    artifacts, _ = exported
    manifest = artifacts.full.manifest
    blobs = BlobStore(tmp_path)
    other = blobs.put(encode_weights({BASE[0]: np.zeros((2, 2), np.float32)}))
    files = {FILE: manifest.files[FILE].model_copy(update={"digest": other})}
    task = _task(manifest.model_copy(update={"files": files}))
    device_setup = DeviceSetup(None, blobs, "onnx", threads=1, holdout=0.0)  # type: ignore[arg-type]
    with pytest.raises(
        RefusedError,
        match=r"frozen tensor 1\.weight of w1\.00-d1 is not float32 \[48, 64\].*export",
    ):
        base_tensors(task.manifest, device_setup.blobs)
    assert base_tensors(manifest.model_copy(update={"base": ()}), device_setup.blobs) == {}


def test_a_manifest_without_a_base_reads_and_writes_as_before(exported):
    """The key is written where there is a base alone, and a base without a file is no manifest."""
    manifest = exported[0].full.manifest
    plain = manifest.model_copy(update={"base": (), "files": {}})
    assert b'"base"' not in plain.to_bytes()
    assert Manifest.model_validate_json(manifest.to_bytes()) == manifest
    with pytest.raises(ValidationError, match="no file with them"):
        Manifest.model_validate({**manifest.model_dump(), "files": {}})


def _task(manifest: Manifest) -> Task:
    instructions = None
    return Task("run", 1, "task", 0, manifest.tier, instructions, manifest, None)  # type: ignore[arg-type]
