"""A model with exits predicts in stages: a sample leaves at the first exit that is sure enough."""

import json

import numpy as np
import pytest
import torch

from broker_server.rounds.artifacts import load_artifacts
from device_runtime.agent.cache import Cache, read_index
from device_runtime.main import main
from device_runtime.predictions.exits import Stages, confidence_of
from device_runtime.predictions.measuring_exits import measure_exits
from device_runtime.predictions.predictor import predict
from device_runtime.predictions.stored_models import BATCH_SIZE, read_board_model
from device_runtime.settings import load_device_config
from device_runtime.training.measuring import graphs_of_prediction
from fleet_protocol.blob_store import BlobStore, write_atomically
from fleet_protocol.errors import ConfigError, DataError
from fleet_protocol.graph_parts import exit_keys
from fleet_protocol.weights import encode_weights
from models import Registry, infer_layout
from models.architecture import build
from tests.device_runtime.tiny_set import initial_weights, write_tiny_set
from tests.marking import mostly_slow
from tests.trainer_export.helpers import TINY
from trainer_export.artifact_set import ExportOptions, ExportRequest, export_architecture
from trainer_export.check import LIMIT
from trainer_export.losses.all_exits_teach import AllExitsTeach
from trainer_export.recipe import Recipe

# Of docs/methods/depthfl.md.
TYPED = (
    "shoal device predict --data new.npz --confidence 0.9",
    "shoal device exits",
)
EXITS = 3
SAMPLES = 40
CONFIG = """
fleet = "lab"
device = "pi-1"
broker = "mqtt://127.0.0.1:1"
state_dir = "state"
holdout = 0.5
predict = true
[data]
kind = "npz"
path = "data.npz"
"""


def exported(folder, *, ensemble):
    """A model with three exits and norms of each sample, whose answer is their mean or the last."""
    arch = Registry.zoo().get("exit_resnet")
    settings = arch.settings({**TINY["exit_resnet"], "norm": "layer"})
    layout = infer_layout(arch, settings)
    recipe = Recipe(loss=AllExitsTeach(ensemble=ensemble))
    tiers = [layout.tier(1.0, EXITS), layout.tier(1.0, EXITS, 0.5)]
    request = ExportRequest(arch, settings, tiers, recipe)
    export_architecture(request, folder, ExportOptions(formats=("onnx",)))
    return load_artifacts(folder, arch.name, chunk_bytes=1024), build(arch, 1.0, settings=settings)


@pytest.fixture(scope="module", params=mostly_slow([True, False], bool), ids=["mean", "last"])
def model(request, tmp_path_factory):
    """Artifacts of the model, the module, and whether its answer is the mean of its exits."""
    folder = tmp_path_factory.mktemp("exits")
    artifacts, module = exported(folder, ensemble=request.param)
    return artifacts, module, request.param


@pytest.fixture
def board(model, tmp_path):
    """A board whose last task left the model, with clear weights so that confidences vary."""
    artifacts, module, _is_mean = model
    draw = np.random.default_rng(0)
    weights = {}
    for name, value in artifacts.initial_weights().items():
        weights[name] = value + draw.normal(0, 0.3, value.shape).astype(np.float32)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.from_numpy(weights[name]))
    x = draw.normal(size=(SAMPLES, *artifacts.full.manifest.input_shape)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(SAMPLES) % artifacts.full.manifest.classes)
    np.savez(tmp_path / "new.npz", x=x)
    (tmp_path / "device.toml").write_text(CONFIG)
    install(tmp_path / "state", artifacts, artifacts.full.manifest, weights)
    return tmp_path


def install(state, artifacts, manifest, weights):
    """Leave a tier on a board, as its last task would."""
    blobs = BlobStore(state)
    for digest, path in artifacts.files.items():
        write_atomically(blobs.path(digest), path.read_bytes(), durable=False)
    graphs = [manifest.graphs[key].digest for key in graphs_of_prediction(manifest)]
    newest = {"run": "r", "round": 2, "version": 1, "tier": manifest.tier}
    sent = blobs.put(
        encode_weights({spec.name: weights[spec.name] for spec in manifest.parameters})
    )
    Cache(state, blobs, 2**30).add_used(blobs.put(manifest.to_bytes()), graphs, sent, newest)


def expected(model, x, bound):
    """Exit and answer of each sample, from all logits of PyTorch."""
    _artifacts, module, is_mean = model
    module.eval()
    with torch.no_grad():
        logits = [value.numpy() for value in module(torch.from_numpy(x))]
    exits = np.full(len(x), EXITS)
    answers = np.mean(logits, axis=0) if is_mean else logits[-1].copy()
    for number in range(EXITS - 1, 0, -1):
        answer = np.mean(logits[:number], axis=0) if is_mean else logits[number - 1]
        leaves = confidence_of(answer) >= bound
        exits[leaves] = number
        answers[leaves] = answer[leaves]
    return exits, answers


@pytest.mark.slow
def test_a_share_trains_the_upper_blocks_with_their_exits(model):
    """The export has compared the step with PyTorch, where what is below is frozen."""
    artifacts, _module, _is_mean = model
    manifest = artifacts.tiers[artifacts.layout.tier(1.0, EXITS, 0.5).id].manifest
    train = manifest.graphs["onnx/train"]
    trained = {port.name for port in train.outputs}
    for place in range(EXITS):
        name = f"exits.{place}.head.weight"
        is_trained = place > 0
        assert (f"next.param.{name}" in trained) == is_trained
        assert (name in manifest.frozen) != is_trained
    (check,) = [check for check in manifest.checks if check.graph == "onnx/train"]
    assert check.worst_relative <= LIMIT


def half_way(model, x):
    """A bound that half of the samples reach at the first exit; none is near it."""
    _artifacts, module, _is_mean = model
    module.eval()
    with torch.no_grad():
        first = np.sort(confidence_of(module(torch.from_numpy(x))[0].numpy()))
    middle = len(first) // 2
    return float(first[middle - 1] + first[middle]) / 2


@pytest.mark.parametrize("bound", [None, 1.0], ids=["half", "none"])
def test_samples_leave_where_pytorch_is_sure(model, board, bound):
    """With the answer up to that exit; a sample that is sure nowhere has the answer of the model."""
    x = np.load(board / "new.npz")["x"]
    bound = bound or half_way(model, x)
    exits, answers = expected(model, x, bound)
    _about, rows = predict(load_device_config(board / "device.toml"), board / "new.npz", bound)
    assert [row["exit"] for row in rows] == exits.tolist()
    np.testing.assert_allclose([row["logits"] for row in rows], answers, rtol=1e-4, atol=1e-4)
    assert [row["label"] for row in rows] == answers.argmax(1).tolist()
    np.testing.assert_allclose([row["share"] for row in rows], confidence_of(answers), rtol=1e-4)
    if bound < 1:
        assert (exits == 1).sum() == SAMPLES // 2


def test_a_stage_computes_only_the_samples_that_stay(model, board, monkeypatch):
    """And no stage runs that nobody needs."""
    config = load_device_config(board / "device.toml")
    stages = Stages(config, read_board_model(config, read_index(config.state_dir)))
    counts = []

    class Counting:
        def __init__(self, session):
            self._session = session

        def __getattr__(self, name):
            return getattr(self._session, name)

        def run(self, names, feeds):
            batched = next(value for name, value in feeds.items() if name[:5] in ("x", "kept."))
            counts.append(len(batched))
            return self._session.run(names, feeds)

    stages._sessions = [Counting(session) for session in stages._sessions]
    x = np.load(board / "new.npz")["x"][:BATCH_SIZE]
    exits = stages.run(x, half_way(model, x)).exits
    assert 0 < (exits == 1).sum() < BATCH_SIZE
    assert counts == [int((exits >= number).sum()) for number in range(1, EXITS + 1)]
    counts.clear()
    stages.run(x, 1e-6)
    assert counts == [len(x)]


@pytest.mark.slow
def test_held_out_samples_measure_each_bound(model, board):
    """Shares add up, the whole model is the last row, and its accuracy is that of its answers."""
    bound = half_way(model, np.load(board / "new.npz")["x"])
    figures = measure_exits(load_device_config(board / "device.toml"), (bound, 0.9))
    assert [figure.confidence for figure in figures] == [bound, 0.9, None]
    assert all(sum(figure.shares) == pytest.approx(1) for figure in figures)
    assert all(figure.milliseconds > 0 for figure in figures)
    whole = figures[-1]
    assert whole.shares == (0.0, 0.0, 1.0)
    assert whole.accuracies == (None, None, whole.accuracy)
    mixed = figures[0]
    parts = [
        share * accuracy
        for share, accuracy in zip(mixed.shares, mixed.accuracies, strict=True)
        if accuracy is not None
    ]
    assert sum(parts) == pytest.approx(mixed.accuracy)


@pytest.mark.slow
def test_the_command_prints_a_line_for_each_bound(board, capsys):
    """With JSON for programs."""
    config = str(board / "device.toml")
    assert main(["exits", "--config", config]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("confidence 0.5: accuracy 0.")
    assert lines[-1].startswith("whole model: accuracy 0.")
    assert main(["exits", "--config", config, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(lines)


def test_the_commands_of_the_page_run(board, capsys, monkeypatch):
    """In the folder of the board's configuration."""
    monkeypatch.chdir(board)
    for line in TYPED:
        program, *words = line.split()
        assert program == "shoal"
        assert main([*words, "--config", "device.toml"]) == 0
    assert "exit" in capsys.readouterr().out


def test_no_held_out_samples_are_an_error(board):
    """Samples that were trained on would look better than new ones."""
    (board / "device.toml").write_text(CONFIG.replace("holdout = 0.5", "holdout = 0"))
    with pytest.raises(DataError, match="set holdout"):
        measure_exits(load_device_config(board / "device.toml"))


@pytest.mark.slow
def test_the_setting_is_used_without_the_option(board, capsys):
    """And the option replaces it."""
    text = CONFIG.replace("predict = true\n", "") + "[predict]\nconfidence = 0.000001\n"
    (board / "device.toml").write_text(text)
    config = str(board / "device.toml")
    assert main(["predict", "--config", config, "--data", str(board / "new.npz"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["predictions"]
    assert {row["exit"] for row in rows} == {1}
    assert main(["predict", "--config", config, "--data", str(board / "new.npz")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(rows)
    assert all(line.endswith("%), exit 1") for line in lines)


def test_a_board_of_the_first_depth_predicts_with_its_only_exit(tmp_path, board):
    """A confidence may be set on all boards of a fleet; there are no bounds to compare here."""
    arch = Registry.zoo().get("exit_resnet")
    settings = arch.settings({**TINY["exit_resnet"], "norm": "layer"})
    shallow = infer_layout(arch, settings).tier(1.0, 1)
    request = ExportRequest(arch, settings, [shallow], Recipe(loss=AllExitsTeach()))
    export_architecture(request, tmp_path / "set", ExportOptions(formats=("onnx",)))
    artifacts = load_artifacts(tmp_path / "set", arch.name, chunk_bytes=1024)
    manifest = artifacts.tiers[shallow.id].manifest
    install(board / "state", artifacts, manifest, artifacts.initial_weights())
    config = load_device_config(board / "device.toml")
    _about, plain = predict(config, board / "new.npz")
    _about, rows = predict(config, board / "new.npz", 0.9)
    assert {row["exit"] for row in rows} == {1}
    assert [row["label"] for row in rows] == [row["label"] for row in plain]
    with pytest.raises(ConfigError, match=r"w1\.00-d1 has one exit"):
        measure_exits(config)


def test_a_model_without_exits_is_refused(tmp_path):
    """The message says what a confidence needs."""
    tiny = write_tiny_set(tmp_path / "state", predicts=True)
    blobs = BlobStore(tmp_path / "state")
    manifest = blobs.put(tiny.manifest.to_bytes())
    newest = {"run": "r", "round": 2, "version": 1, "tier": tiny.manifest.tier}
    graphs = [spec.digest for spec in tiny.manifest.graphs.values()]
    weights = blobs.put(encode_weights(initial_weights()))
    Cache(tmp_path / "state", blobs, 2**30).add_used(manifest, graphs, weights, newest)
    np.savez(tmp_path / "data.npz", x=np.zeros((4, 3, 4), np.float32), y=np.zeros(4, np.int64))
    (tmp_path / "device.toml").write_text(CONFIG)
    with pytest.raises(ConfigError, match="no exits"):
        predict(load_device_config(tmp_path / "device.toml"), tmp_path / "data.npz", 0.9)


def test_stages_are_in_the_order_of_their_exits():
    """Ten comes after nine."""
    keys = [f"onnx/exit{number}" for number in range(11, 0, -1)]
    assert exit_keys([*keys, "onnx/exits", "onnx/infer"]) == tuple(reversed(keys))
