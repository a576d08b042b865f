"""`shoal device predict`: the newest model that a board was sent, or its own, judges samples where
the board is.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from device_runtime.agent.cache import Cache
from device_runtime.main import main
from device_runtime.predictions.predictor import Predictor, predict
from device_runtime.settings import load_device_config
from device_runtime.training.own_model import OwnModel
from device_runtime.training.own_model_files import OwnModelFiles
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.digests import blob_digest
from fleet_protocol.errors import BlobError, ConfigError, DataChangedError, DataError
from fleet_protocol.mapped_tensors import tensors_in
from fleet_protocol.weights import encode_weights
from models.registry import Registry
from models.tier import Tier
from tests.brokers import any_broker
from tests.device_runtime.device_process import REPOSITORY, DeviceProcess
from tests.device_runtime.scripted_server import scripted_server
from tests.device_runtime.tiny_set import (
    CLASSES,
    EPS,
    SHAPE,
    initial_weights,
    samples,
    write_tiny_set,
)
from trainer_export.pair_set import Pair, PairModel, export_pairs
from trainer_export.recipe import Recipe

# Of docs/methods/private.md.
TYPED = (
    "shoal device export-weights --out board.safetensors",
    "shoal device export-weights --fleet-only --out fleet.safetensors",
)
CONFIG = """
fleet = "lab"
device = "pi-1"
broker = "mqtt://127.0.0.1:1"
state_dir = "state"
holdout = 0
predict = true
[data]
kind = "npz"
path = "data.npz"
scale = 0.5
"""


def told(weights, x, data, scale=0.5):
    """The model in numpy, float64, with statistics as a board measures them: means over batches of
    the samples.
    """
    flat = (data * scale).reshape(len(data), -1).astype(np.float64)
    centred = (x * scale).reshape(len(x), -1) - flat.mean(0)
    xn = centred / np.sqrt(flat.var(0, ddof=1) + EPS)
    return xn @ weights["linear.weight"].T + weights["linear.bias"]


@pytest.fixture
def board(tmp_path):
    """A board whose data fits one batch, so that its statistics are those of all samples."""
    x, y = samples(30)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    (tmp_path / "device.toml").write_text(CONFIG)
    return tmp_path


def keep(board, weights, version=1, *, infer=True, max_bytes=2**30):
    """What fetching a task leaves in the state folder."""
    tiny = write_tiny_set(board / "state", predicts=infer)
    blobs = BlobStore(board / "state")
    manifest = blobs.put(tiny.manifest.to_bytes())
    digest = blobs.put(encode_weights(weights))
    newest = {"run": "r", "round": version + 1, "version": version, "tier": tiny.manifest.tier}
    graphs = [spec.digest for spec in tiny.manifest.graphs.values()]
    cache = Cache(board / "state", blobs, max_bytes)
    cache.add_used(manifest, graphs, digest, newest)
    return cache, digest


def found(board, name):
    return predict(load_device_config(board / "device.toml"), board / name)


def logits(board, name):
    return np.array([row["logits"] for row in found(board, name)[1]])


def test_the_newest_model_judges(board):
    """As the same model in numpy does, with the board's own statistics; the one before has no say
    any more.
    """
    x, _ = samples(40, seed=3)
    np.savez(board / "new.npz", x=x)
    keep(board, initial_weights(1))
    keep(board, initial_weights(2), version=7)
    model, rows = found(board, "new.npz")
    digest = blob_digest(encode_weights(initial_weights(2)))
    assert model == {"run": "r", "round": 8, "version": 7, "tier": "w1.00-d1", "digest": digest}
    wanted = told(initial_weights(2), x, samples(30)[0])
    np.testing.assert_allclose([row["logits"] for row in rows], wanted, rtol=1e-4, atol=1e-4)
    assert [row["label"] for row in rows] == wanted.argmax(1).tolist()
    shares = np.exp(wanted) / np.exp(wanted).sum(1, keepdims=True)
    np.testing.assert_allclose([row["share"] for row in rows], shares.max(1), rtol=1e-3)


def test_artifact_sets_that_are_staged_leave_the_model(board):
    """Of a set that no task has used yet only what trains is there."""
    x, _ = samples(40, seed=3)
    np.savez(board / "new.npz", x=x)
    cache, _ = keep(board, initial_weights(1))
    before = found(board, "new.npz")
    blobs = BlobStore(board / "state")
    anew = json.loads(blobs.read(cache.index.sets[-1].manifest))
    for graph in anew["graphs"].values():
        graph["digest"] = graph["digest"][::-1]
    cache.add_staged(blobs.put(json.dumps(anew).encode()), [])
    assert found(board, "new.npz") == before


def test_every_format_gives_the_same(board):
    """Arrays, and tables with and without their label."""
    keep(board, initial_weights())
    x, _ = samples(3, seed=5)
    x = np.round(x, 3)
    np.savez(board / "new.npz", x=x)
    np.save(board / "new.npy", x)
    names = ",".join(f"c{i}" for i in range(12))
    lines = [",".join(f"{value:.3f}" for value in row) for row in x.reshape(3, -1)]
    (board / "bare.csv").write_text("\n".join([names, *lines]))
    (board / "labelled.csv").write_text(
        "\n".join([f"label,{names}", *(f"2,{line}" for line in lines)])
    )
    wanted = logits(board, "new.npz")
    for name in ("new.npy", "bare.csv", "labelled.csv"):
        np.testing.assert_allclose(logits(board, name), wanted, rtol=1e-5)


def test_an_image(board):
    """It is made grey and of the model's size unless [data] says otherwise."""
    image = pytest.importorskip("PIL.Image")
    keep(board, initial_weights())
    pixels = np.arange(12, dtype=np.uint8).reshape(SHAPE) * 20
    image.fromarray(pixels).save(board / "new.png")
    np.save(board / "new.npy", pixels[None])
    np.testing.assert_allclose(logits(board, "new.png"), logits(board, "new.npy"), rtol=1e-5)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda path: np.savez(path, z=np.zeros((2, *SHAPE))), "has no array 'x' (it has z)"),
        (
            lambda path: np.savez(path, x=np.zeros((2, 5))),
            "have shape [5], which cannot become `shape` [3, 4]",
        ),
        (lambda path: np.savez(path, x=np.full((1, *SHAPE), np.nan)), "not finite"),
        (lambda path: path.write_text("no archive"), "not a numpy file"),
    ],
)
def test_samples_that_the_model_cannot_take(board, write, words):
    """The message names the file and what is wrong."""
    keep(board, initial_weights())
    write(board / "new.npz")
    with pytest.raises(DataError) as error:
        found(board, "new.npz")
    assert words in str(error.value)


def test_samples_on_which_the_graph_does_not_run_are_an_error_of_the_data(board):
    """As a token beyond the vocabulary, which only the graph finds: the runtime's own error had no
    exit code.
    """
    keep(board, initial_weights())
    predictor = Predictor(load_device_config(board / "device.toml"))
    predictor(board / "data.npz")
    with pytest.raises(
        DataError, match=r"the graph does not run on these samples: .*INVALID_ARGUMENT"
    ):
        predictor._outputs(iter([(np.zeros((2, 5), np.float32), None)]), np.inf)


def test_a_file_that_changes_while_it_is_judged_is_named(board, monkeypatch):
    """Predictions of half of the old samples and half of the new are none."""
    keep(board, initial_weights())
    x = samples(10, 2)[0]
    np.save(board / "some.npy", x)
    rows = Predictor._outputs

    def while_it_is_written(self, data, ends):
        outputs = rows(self, data, ends)
        np.save(board / "some.npy", x[::-1])
        return outputs

    monkeypatch.setattr(Predictor, "_outputs", while_it_is_written)
    with pytest.raises(
        DataChangedError,
        match=r"some\.npy changed after it was read; write new data beside the old",
    ):
        found(board, "some.npy")
    monkeypatch.undo()
    assert len(found(board, "some.npy")[1]) == 10


def test_what_a_board_lacks(board):
    """No round yet, no graph, weights that are gone: each says what to do."""
    with pytest.raises(ConfigError, match="let the board take part in a round first"):
        found(board, "data.npz")
    keep(board, initial_weights(), infer=False)
    with pytest.raises(ConfigError, match="set predict = true"):
        found(board, "data.npz")
    _, digest = keep(board, initial_weights())
    BlobStore(board / "state").path(digest).write_bytes(b"x")
    with pytest.raises(BlobError, match="was damaged on disk and removed"):
        found(board, "data.npz")


def test_a_model_that_is_replaced_while_it_is_read(board, monkeypatch):
    """The index was read, then the agent came to the next round and removed the old weights."""
    keep(board, initial_weights(1), version=1)
    from device_runtime.predictions import predictor as module  # noqa: PLC0415

    first = module.read_index(board / "state")
    cache, _ = keep(board, initial_weights(2), version=2)
    BlobStore(board / "state").remove(first.weights[-1])
    indices = iter([first, cache.index, cache.index])
    monkeypatch.setattr(module, "read_index", lambda _folder: next(indices))
    assert found(board, "data.npz")[0]["version"] == 2


def test_the_command(board, capsys):
    """JSON for programs, a line for each sample for people, an error in one line."""
    keep(board, initial_weights())
    arguments = [
        "device",
        "predict",
        "--config",
        str(board / "device.toml"),
        "--data",
        str(board / "data.npz"),
    ]
    assert main([*arguments, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["model"]["version"] == 1
    assert len(said["predictions"]) == 30
    first = said["predictions"][0]
    assert (first["label"], len(first["logits"])) == (int(np.argmax(first["logits"])), CLASSES)
    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"0: {first['label']} ({first['share']:.1%})"
    assert main([*arguments[:-1], str(board / "none.npz")]) == 4
    assert capsys.readouterr().err.startswith("error: the data file")


@pytest.mark.slow
def test_the_personal_model(board):
    """Where a board has one it judges: as its set starts it, then as the last round left it."""
    mlp = Registry.zoo().get("mlp")
    settings = mlp.settings({"input_shape": SHAPE, "hidden": (8,)})
    model = PairModel(mlp, Tier(1.0), settings)
    (report,) = export_pairs([Pair(model, model)], Recipe(), board / "sets", name="pair")
    with (board / "device.toml").open("a") as file:
        file.write(f'[own_model]\nset = "{report.folder}"\n')
    own = OwnModel(report.folder, board / "state")
    start = tensors_in(own.read(own.manifest().own_init))
    x = samples(30)[0] * 0.5

    def wanted(weights):
        first = x.reshape(len(x), -1) @ weights["hidden.0.weight"].T + weights["hidden.0.bias"]
        return np.maximum(first, 0) @ weights["head.weight"].T + weights["head.bias"]

    keep(board, initial_weights())  # of the fleet; the personal model goes before it
    assert found(board, "data.npz")[0] == {"own": "mlp", "tier": "w1.00-d1", "from": "its set"}
    np.testing.assert_allclose(logits(board, "data.npz"), wanted(start), rtol=1e-4, atol=1e-5)
    later = {name: value + np.float32(0.1) for name, value in start.items()}
    own.files.save("older", 9, {f"model/{name}": value for name, value in start.items()})
    os.utime(next((board / "state").glob("own-model-older-*")), (1, 1))
    own.files.save("newer", 3, {f"model/{name}": value for name, value in later.items()})
    about = found(board, "data.npz")[0]
    assert about["from"] == "own-model-newer-3.safetensors"
    assert about["digest"] == blob_digest((board / "state" / about["from"]).read_bytes())
    np.testing.assert_allclose(logits(board, "data.npz"), wanted(later), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_beside_a_running_agent(tmp_path):
    """A real agent fetches the graph with its task; a process without a network judges with each
    version it gets.
    """
    x, y = samples(30)
    np.savez(tmp_path / "data.npz", x=x, y=y)
    tiny = write_tiny_set(tmp_path / "blobs", predicts=True)
    with (
        any_broker(tmp_path) as broker,
        scripted_server(broker.url, BlobStore(tmp_path / "blobs")) as server,
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX) as link,
    ):
        data = {"kind": "npz", "path": str(tmp_path / "data.npz")}
        path = Path(folder) / "predict.sock"  # pytest's own folder is too long for one
        device = DeviceProcess(
            tmp_path / "device", broker.url, data, holdout=0, **{"predict.socket": str(path)}
        )
        device.start()
        try:
            server.wait_state("idle")
            link.settimeout(60)
            link.connect(str(path))
            for version in (3, 4):
                choice = tiny.choice(initial_weights(version))
                server.offer(
                    device.id, choice, task=f"t{version}", round=version + 1, version=version
                )
                server.wait_update(f"t{version}")
                command = [
                    sys.executable,
                    "-m",
                    "device_runtime",
                    "predict",
                    "--json",
                    "--config",
                    str(device.config),
                ]
                done = subprocess.run(
                    [*command, "--data", str(tmp_path / "data.npz")],
                    capture_output=True,
                    text=True,
                    check=False,
                    cwd=REPOSITORY,
                    timeout=120,
                )
                assert done.returncode == 0, done.stderr
                said = json.loads(done.stdout)
                assert said["model"]["version"] == version
                wanted = told(initial_weights(version), x, x, scale=1)
                found_logits = [row["logits"] for row in said["predictions"]]
                np.testing.assert_allclose(found_logits, wanted, rtol=1e-3, atol=1e-3)
                link.sendall(json.dumps({"x": x.tolist()}).encode() + b"\n")
                with link.makefile("rb") as lines:
                    assert json.loads(lines.readline()) == said
            device.terminate()
            assert not path.exists()
        finally:
            device.kill()


def keep_private(board, values, run="r", number=2):
    """What a round with private parts leaves in the state folder."""
    tiers = {"w1.00-d1": values}
    OwnModelFiles(board / "state", prefix="private-").save_tiers(run, number, tiers)


def test_a_board_predicts_with_its_private_part(board):
    """That of the run of the newest model and of its newest round, as soon as it is there."""
    x, _ = samples(40, seed=3)
    np.savez(board / "new.npz", x=x)
    keep(board, initial_weights(1))
    predictor = Predictor(load_device_config(board / "device.toml"))
    before, _rows = predictor(board / "new.npz")
    assert "private" not in before
    name = "linear.bias"
    keep_private(board, {name: np.full(CLASSES, 9, np.float32)}, run="another", number=9)
    keep_private(board, {name: np.full(CLASSES, 5, np.float32)}, number=1)
    own = {**initial_weights(1), name: np.arange(CLASSES, dtype=np.float32)}
    keep_private(board, {name: own[name]})
    model, rows = predictor(board / "new.npz")
    assert model["private"] == "1 parameters"
    wanted = told(own, x, samples(30)[0])
    np.testing.assert_allclose([row["logits"] for row in rows], wanted, rtol=1e-4, atol=1e-4)


def test_the_owner_of_a_board_takes_its_model_out(board, capsys, monkeypatch):
    """The complete model with its statistics in a file; the fleet's part only if asked for."""
    keep(board, initial_weights(1))
    private = np.arange(CLASSES, dtype=np.float32)
    keep_private(board, {"linear.bias": private})
    monkeypatch.chdir(board)
    for line in TYPED:
        program, *words = line.split()
        assert program == "shoal"
        assert main([*words, "--config", "device.toml"]) == 0
    assert "board.safetensors: run r, round 2, version 1, tier w1.00-d1" in capsys.readouterr().out
    own = tensors_in((board / "board.safetensors").read_bytes())
    sent = tensors_in((board / "fleet.safetensors").read_bytes())
    np.testing.assert_array_equal(own["linear.bias"], private)
    np.testing.assert_array_equal(sent["linear.bias"], initial_weights(1)["linear.bias"])
    np.testing.assert_array_equal(own["linear.weight"], sent["linear.weight"])
    statistics = [name for name in own if name.startswith("stat.")]
    assert statistics
    for name in statistics:
        np.testing.assert_array_equal(own[name], sent[name])


def test_a_private_part_of_another_model_is_named(board, capsys):
    """Nothing is written."""
    keep(board, initial_weights(1))
    keep_private(board, {"linear.bias": np.zeros(99, np.float32)})
    words = ["--config", str(board / "device.toml"), "--out", str(board / "own.safetensors")]
    assert main(["export-weights", *words]) == ConfigError.exit_code
    assert (
        "linear.bias of this board, [99], belongs to a different model" in capsys.readouterr().err
    )
    assert not (board / "own.safetensors").exists()
