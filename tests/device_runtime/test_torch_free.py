"""A board without torch and onnx: a virtual environment with the `device` extra trains sets that
the exporter made.
"""

import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

from device_runtime.training.backends import TrainSession
from device_runtime.training.epochs import train
from device_runtime.training.hooks import Hooks
from device_runtime.training.schedule import TrainingSchedule
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.blobs import blob_ref
from fleet_protocol.data import make_dataset
from fleet_protocol.manifest import Manifest, parse_manifest
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.messages import Done, TierChoice, TrainSettings
from fleet_protocol.weights import encode_weights
from models.registry import Registry
from models.tier import Tier
from tests.brokers import embedded_broker
from tests.device_runtime.device_process import REPOSITORY, DeviceProcess
from tests.device_runtime.scripted_server import scripted_server
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.recipe import Recipe

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SAMPLES = 100
CLASSES = 10
TRAIN = {"learning_rate": 0.05, "epochs": 2, "batch_size": 16, "seed": 5}


def device_requirements() -> list[str]:
    """What `pip install 'shoal[device]'` brings, read from the project's own file."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *project["optional-dependencies"]["device"]]
    return [text for text in texts if (mark := Requirement(text).marker) is None or mark.evaluate()]


@pytest.fixture(scope="session")
def board_python(tmp_path_factory) -> Path:
    """Interpreter of an environment like a board's."""
    folder = tmp_path_factory.mktemp("board") / "venv"
    venv.create(folder)
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    constraints = REPOSITORY / "constraints.txt"
    pinned = ["--constraint", str(constraints)] if constraints.is_file() else []
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-compile",
        *pinned,
    ]
    done = subprocess.run(
        [*command, *device_requirements()], capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        pytest.skip(f"pip cannot install the device's packages here: {done.stderr.strip()[-300:]}")
    return python


@pytest.fixture(scope="session", params=["conv", "text_encoder"])
def exported(request, tmp_path_factory) -> tuple[BlobStore, Manifest, bytes]:
    """A set from the exporter, in a blob store, with its manifest's bytes."""
    out = tmp_path_factory.mktemp("artifacts")
    settings = {"channels": [16, 32], "input_shape": [1, 8, 8]} if request.param == "conv" else {}
    arch = Registry.zoo().get(request.param)
    export_architecture(
        ExportRequest(arch, settings, [Tier(0.5, 1)], Recipe()),
        out,
        ExportOptions(formats=("onnx",)),
    )
    data = next((out / request.param).glob("*/manifest.json")).read_bytes()
    return BlobStore(out), parse_manifest(data), data


def samples_for(manifest: Manifest) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(3)
    y = draw.integers(0, manifest.classes, SAMPLES)
    shape = (SAMPLES, *manifest.input_shape)
    if manifest.input_dtype == "int64":
        return draw.integers(1, 50, shape), y
    x = draw.normal(size=shape) + y.reshape(-1, *[1] * (len(shape) - 1)) / 5
    return x.astype(np.float32), y


def test_the_board_has_neither_torch_nor_onnx(board_python):
    """The extra brings no training framework."""
    code = "import importlib.util as u; print([n for n in ('torch', 'onnx') if u.find_spec(n)])"
    done = subprocess.run(
        [board_python, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.fixture
def broker(tmp_path) -> Iterator[str]:
    with embedded_broker(tmp_path) as running:
        yield running.url


def test_a_board_trains_an_exported_set(board_python, exported, broker, tmp_path):
    """On stock onnxruntime in its own environment a device computes the update that this process
    computes.
    """
    blobs, manifest, manifest_bytes = exported
    x, y = samples_for(manifest)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    draw = np.random.default_rng(1)
    weights = {p.name: draw.normal(0, 0.1, p.shape).astype(np.float32) for p in manifest.parameters}
    data = encode_weights(weights)
    blobs.put(data)
    blobs.put(manifest_bytes)  # under the name of new blobs; a set itself has those of its files
    choice = TierChoice(
        tier=manifest.tier, artifact_set=blob_ref(manifest_bytes), weights=blob_ref(data)
    )
    device = DeviceProcess(
        tmp_path,
        broker,
        {"kind": "npz", "path": "data.npz"},
        python=str(board_python),
        holdout=0,
        backend="onnx",
    )
    with scripted_server(broker, blobs) as server:
        server.chunk_bytes = choice.weights.chunk_bytes
        device.start()
        try:
            server.wait_state("idle", device.id)
            assert server.profiles[-1].backends["onnx"].startswith("onnxruntime ")
            server.offer(device.id, choice, round=2, train=TRAIN)
            update = tensors_in(server.wait_update("t1"))
            done = server.heard(Done)[0]
        finally:
            device.kill()
    session = TrainSession(manifest, blobs.path(manifest.graphs["onnx/train"].digest))
    session.load(weights)
    settings = TrainSettings(**TRAIN)
    dataset = make_dataset("d", x, y)
    result = train(
        session, manifest, TrainingSchedule(dataset, np.arange(SAMPLES), settings, 2), Hooks()
    )
    assert done.metrics.train_loss == pytest.approx(result.loss, abs=1e-4)
    for name, value in session.parameters().items():
        np.testing.assert_allclose(update[name], value, atol=1e-4, err_msg=name)
