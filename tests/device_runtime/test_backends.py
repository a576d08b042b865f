"""Both flavours of the step graph run in one session class and agree."""

import numpy as np
import pytest

from device_runtime.bench import SMALL
from device_runtime.board import installed_backends
from device_runtime.training.backends import TrainSession, choose_backend, runtime, step_graph_key
from fleet_protocol.errors import ConfigError
from fleet_protocol.manifest import parse_manifest
from fleet_protocol.mapped_tensors import open_tensors
from models import infer_layout
from models.registry import Registry
from models.tier import Tier
from tests.adapted import adapted
from trainer_export.artifact_set import ExportRequest, export_architecture
from trainer_export.recipe import Recipe


def test_the_backend_is_what_is_installed():
    """`auto` takes the training runtime where there is one; a wish that cannot be met names the
    extra.
    """
    installed = installed_backends()
    assert choose_backend("auto") == ("ort-training" if "ort-training" in installed else "onnx")
    assert choose_backend("onnx") == "onnx"
    with pytest.raises(ConfigError, match="'tpu' is not installed on this board"):
        choose_backend("tpu")


def test_a_small_step_takes_its_memory_as_one_block_to_the_same_bits(monkeypatch):
    """Whatever size the batches have, in turns; a step that needs more memory asks for each
    tensor.
    """
    manifest = parse_manifest((SMALL / "manifest.json").read_bytes())
    chosen = []
    ended = []
    made = runtime.make_session
    monkeypatch.setattr(
        runtime,
        "make_session",
        lambda graph, options, provider: chosen.append(options) or made(graph, options, provider),
    )
    draw = np.random.default_rng(0)
    start = {
        spec.name: draw.normal(0, 0.1, spec.shape).astype(np.float32)
        for spec in manifest.parameters
    }
    sizes = (8, 8, 3, 8, 3, 8)
    xs = [draw.random((size, *manifest.input_shape), np.float32) for size in sizes]
    for peak in (8 * 2**20, 8 * 2**20 + 1):
        told = manifest.model_copy(update={"peak_memory_bytes": peak})
        session = TrainSession(told, SMALL / manifest.graphs["onnx/train"].path)
        session.load(start)
        for x in xs:
            session.step(
                x, np.arange(len(x)) % manifest.classes, np.ones(manifest.classes, np.float32), 0.1
            )
        ended.append({name: value.copy() for name, value in session.parameters().items()})
    assert [options.enable_mem_pattern for options in chosen] == [True, False]
    for name, value in ended[0].items():
        np.testing.assert_array_equal(ended[1][name], value)


@pytest.mark.slow
@pytest.mark.ort_training
@pytest.mark.parametrize("name", ["lenet5", "text_encoder"])
def test_both_flavours_agree(name, tmp_path):
    """Ten steps of either graph, bound and swapped by the same code, give the same parameters."""
    export_architecture(
        ExportRequest(Registry.zoo().get(name), {}, [Tier(0.5, 1)], Recipe()), tmp_path
    )
    folder = next((tmp_path / name).glob("w*"))
    manifest = parse_manifest((folder / "manifest.json").read_bytes())
    keys = [step_graph_key(backend, manifest) for backend in ("onnx", "ort-training")]
    assert keys == ["onnx/train", "ort-training/step"]
    draw = np.random.default_rng(0)
    weights = {p.name: draw.normal(0, 0.1, p.shape).astype(np.float32) for p in manifest.parameters}
    shape = (16, *manifest.input_shape)
    batches = []
    for _ in range(10):
        x = (
            draw.integers(1, 20, shape)
            if manifest.input_dtype == "int64"
            else draw.normal(size=shape)
        )
        batches.append((x.astype(manifest.input_dtype), draw.integers(0, manifest.classes, 16)))
    mask = np.ones(manifest.classes, np.float32)
    results = []
    for key in keys:
        session = TrainSession(manifest, folder / manifest.graphs[key].path)
        session.load(weights)
        losses = [session.step(x, y, mask, 0.05) for x, y in batches]
        results.append((losses, session.parameters()))
    np.testing.assert_allclose(results[0][0], results[1][0], atol=1e-4)
    for name_, value in results[0][1].items():
        np.testing.assert_allclose(results[1][1][name_], value, atol=1e-4, err_msg=name_)


@pytest.mark.ort_training
def test_both_backends_train_beside_the_same_mapped_base(tmp_path):
    """Adapters beside frozen layers: the runtime is given the mapping itself, and both end in the
    same place.
    """
    layout = infer_layout(adapted)
    export_architecture(ExportRequest(adapted, {}, [layout.tier(0.5)], Recipe()), tmp_path)
    folder = tmp_path / "adapted" / layout.tier(0.5).id
    manifest = parse_manifest((folder / "manifest.json").read_bytes())
    base = open_tensors(folder / "base.safetensors")
    rng = np.random.default_rng(1)
    start = {
        spec.name: rng.normal(0, 0.1, spec.shape).astype(np.float32) for spec in manifest.parameters
    }
    x = rng.random((8, 1, 8, 8), np.float32)
    y = np.arange(8) % 10
    ended = []
    for key in ("onnx/train", "ort-training/step"):
        session = TrainSession(manifest, folder / manifest.graphs[key].path, base=base)
        session.load(start)
        losses = [session.step(x, y, np.ones(10, np.float32), 0.1) for _ in range(3)]
        assert losses[-1] < losses[0]
        assert all(
            session.addresses()[f"param.{name}"] == value.ctypes.data
            for name, value in base.items()
        )
        ended.append({name: value.copy() for name, value in session.parameters().items()})
    for name, value in ended[0].items():
        np.testing.assert_allclose(ended[1][name], value, rtol=1e-4, atol=1e-6)
