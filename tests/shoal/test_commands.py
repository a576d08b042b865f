"""The commands as a user types them: results, JSON, error messages and exit codes."""

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from broker_server.store import Store, VersionRecord
from broker_server.store.records import RunRecord
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.manifest import parse_manifest
from fleet_protocol.mapped_tensors import open_tensors
from fleet_protocol.recipe import RecipeTable
from fleet_protocol.weights import encode_weights
from models.registry import Registry
from models.zoo.initial_state import initial_weights
from shoal.cli.options import read_recipe
from tests.brokers import free_port

SHOAL = Path(sys.executable).with_name("shoal")


def shoal(*arguments, cwd, timeout=120):
    return subprocess.run(
        [SHOAL, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


FLEET = """
fleet = "t"
store = "store"
[broker]
url = "mqtt://127.0.0.1:{port}"
connect_timeout_seconds = 1
[model]
arch = "mlp"
"""
DEVICE = """
fleet = "t"
device = "d"
broker = "mqtt://127.0.0.1:{port}"
state_dir = "state"
connect_timeout_seconds = 1
[data]
kind = "npz"
path = "data.npz"
"""


@pytest.fixture
def folder(tmp_path):
    port = free_port()
    (tmp_path / "fleet.toml").write_text(FLEET.format(port=port))
    (tmp_path / "device.toml").write_text(DEVICE.format(port=port))
    np.savez(tmp_path / "data.npz", x=np.zeros((8, 4), np.float32), y=np.arange(8) % 2)
    return tmp_path


def edit(path, old, new):
    path.write_text(path.read_text().replace(old, new))


def test_version_and_help(tmp_path):
    """The command says what it is, and lists its commands."""
    assert shoal("--version", cwd=tmp_path).stdout.startswith("shoal 0.")
    listed = shoal("--help", cwd=tmp_path).stdout
    for command in (
        "export",
        "up",
        "run",
        "device",
        "status",
        "devices",
        "rounds",
        "log",
        "export-weights",
        "demo",
    ):
        assert command in listed


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("shoal exp", ["export", "export-mutual", "export-weights"]),
        ("shoal rounds sh", ["show"]),
        ("shoal log --fo", ["--follow"]),
        ("shoal init lab --template t", ["tabular", "text"]),
    ],
)
def test_a_shell_completes_commands_and_options(tmp_path, typed, offered):
    """What `shoal --install-completion` lets bash ask; only the command that is typed is
    imported.
    """
    asked = {
        "_SHOAL_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
    }
    environment = os.environ | asked
    done = subprocess.run(
        [SHOAL],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == offered


def test_export_prints_a_table_and_json(tmp_path, typed):
    """One row per tier, and the same as JSON; the set is on disk under its names."""
    command = [
        "export",
        "--arch",
        "mlp",
        "--widths",
        "1,1/4",
        "--set",
        "input_shape=1,4,4",
        "--formats",
        "onnx",
    ]
    table = typed(*command)
    assert table.returncode == 0, table.stderr
    assert "w0.25-d1" in table.stdout
    rows = json.loads(typed(*command, "--json").stdout)
    assert [row["tier"] for row in rows] == ["w1.00-d1", "w0.25-d1"]
    assert all(0 <= row["worst_deviation"] < 1e-4 for row in rows)
    assert (tmp_path / "artifacts" / "mlp" / "w0.25-d1" / "train.onnx").is_file()


@pytest.mark.slow
def test_export_starts_from_a_file_and_from_the_store_of_a_run(tmp_path):
    """Renamed tensors of a file of torch, then the newest version of a store; a bad mapping says
    how it is written.
    """
    command = [
        "export",
        "--arch",
        "mlp",
        "--set",
        "input_shape=1,4,4",
        "--set",
        "hidden=6,6",
        "--formats",
        "onnx",
    ]
    initial = tmp_path / "artifacts" / "mlp" / "init.safetensors"
    drawn = initial_weights(Registry.zoo().get("mlp"), {"input_shape": (1, 4, 4), "hidden": (6, 6)})
    torch.save(
        {f"net.{name}": torch.tensor(value + 1) for name, value in drawn.items()},
        tmp_path / "there.pt",
    )
    wrong = shoal(*command, "--start", "there.pt", "--start-name", "net.*", cwd=tmp_path)
    assert (wrong.returncode, "give THEIRS=OURS" in wrong.stderr) == (2, True), wrong.stderr
    renamed = shoal(*command, "--start", "there.pt", "--start-name", "net.*=*", cwd=tmp_path)
    assert renamed.returncode == 0, renamed.stderr
    np.testing.assert_array_equal(
        open_tensors(initial)[next(iter(drawn))], drawn[next(iter(drawn))] + 1
    )
    with closing(Store(tmp_path / "store")) as store:
        digest = BlobStore(tmp_path / "store" / "blobs").put(
            encode_weights({k: v + 2 for k, v in drawn.items()})
        )
        record = RunRecord("run", "t", "mlp", "{}", "finished", None, 0.0, 0.0, 0, 0)
        store.add_run(record, VersionRecord("run", 0, 0, digest, None, None, 0.0, None))
    stored = shoal(*command, "--start", "store", cwd=tmp_path)
    assert stored.returncode == 0, stored.stderr
    np.testing.assert_array_equal(
        open_tensors(initial)[next(iter(drawn))], drawn[next(iter(drawn))] + 2
    )


OWN = """
from torch import nn
from shoal import architecture

@architecture()
def own(cut, *, input_shape=(1, 6, 6), classes=3, channels=4):
    kept = cut.width("channels", channels)
    return nn.Sequential(
        nn.Conv2d(1, kept, 3), nn.BatchNorm2d(kept), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Dropout(0.5), nn.Linear(kept, cut.classes(classes)),
    )
"""


@pytest.mark.slow
def test_export_explains_how_it_cuts(tmp_path, typed):
    """Each tensor with the axes it is cut along and its shape in each tier; nothing is written."""
    command = ["export", "--arch", "lenet5", "--widths", "1,0.5", "--explain"]
    assert "fc1 x conv2*25" in typed(*command).stdout
    rows = {row["tensor"]: row for row in json.loads(typed(*command, "--json").stdout)}
    assert rows["fc1.weight"]["cut along"] == ["fc1", "conv2*25"]
    assert rows["fc1.weight"]["w0.50-d1"] == [60, 200]
    assert rows["head.bias"]["cut along"] == ["-"]
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_export_converts_a_module_as_it_is(tmp_path):
    """What cannot be exported is replaced, and the table says what; who does not want that gets a
    refusal that names it.
    """
    (tmp_path / "own.py").write_text(OWN)
    command = [
        "export",
        "--arch",
        "own",
        "--models",
        "own.py",
        "--widths",
        "1,0.5",
        "--formats",
        "onnx",
    ]
    refused = shoal(*command, "--no-convert", cwd=tmp_path)
    assert refused.returncode == 2
    assert "--convert" in refused.stderr
    done = shoal(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for old, new in (
        ("BatchNorm2d", "StaticBatchNorm"),
        ("ReLU(inplace=True)", "the same"),
        ("Dropout", "an input"),
    ):
        assert old in done.stdout
        assert new in done.stdout
    assert (tmp_path / "artifacts" / "own" / "w0.50-d1" / "stats.onnx").is_file()


@pytest.mark.slow
def test_export_reads_the_recipe_of_a_configuration(tmp_path):
    """The file's table, with what the options say instead; the server then takes no other
    artifacts.
    """
    text = """[fleet]
[model.recipe]
optimizer = { name = "adamw", beta1 = 0.8 }
clip_norm = 0.5
"""
    (tmp_path / "fleet.toml").write_text(text)
    command = [
        "export",
        "--arch",
        "mlp",
        "--set",
        "input_shape=1,4,4",
        "--formats",
        "onnx",
        "--recipe",
        "fleet.toml",
    ]
    done = shoal(*command, "--weight-decay", "0.25", "--optimizer-set", "beta2=0.9", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    recipe = parse_manifest(
        (tmp_path / "artifacts" / "mlp" / "w1.00-d1" / "manifest.json").read_bytes()
    ).recipe
    assert recipe.optimizer.name == "adamw"
    assert recipe.optimizer.settings == {
        "beta1": 0.8,
        "beta2": 0.9,
        "eps": 1e-8,
        "weight_decay": 0.25,
    }
    assert recipe.clip_norm == 0.5
    table = read_recipe(tmp_path / "fleet.toml")
    assert not table.difference(recipe)
    said = RecipeTable.model_validate_json(table.model_dump_json())  # as a store keeps it
    assert said == table
    assert said.model_fields_set == table.model_fields_set
    assert RecipeTable(optimizer="sgd").difference(recipe) == "optimizer is adamw, not sgd"
    assert (
        RecipeTable(weight_decay=0.5).difference(recipe)
        == "optimizer's weight_decay is 0.25, not 0.5"
    )
    assert RecipeTable(proximal=True).difference(recipe) == "proximal is False, not True"


def test_export_takes_several_numbers_of_a_loss(tmp_path, typed):
    """Weights of classes, a number for each: on the command line they had always ended in a
    traceback.
    """
    command = [
        "export",
        "--arch",
        "mlp",
        "--set",
        "input_shape=1,4,4",
        "--set",
        "classes=3",
        "--set",
        "hidden=4",
    ]
    done = typed(*command, "--formats", "onnx", "--loss-set", "class_weights=1,2,0.5")
    assert done.returncode == 0, done.stderr
    recipe = parse_manifest(
        (tmp_path / "artifacts" / "mlp" / "w1.00-d1" / "manifest.json").read_bytes()
    ).recipe
    assert recipe.loss.settings["class_weights"] == [1, 2, 0.5]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["export", "--arch", "mpl"], 2, "did you mean 'mlp'"),
        (["export", "--arch", "mlp", "--widths", "1,2"], 2, "not in (0, 1]"),
        (["export", "--arch", "mlp", "--depths", "9"], 2, "depth"),
        (["export", "--arch", "mlp", "--set", "hiden=3"], 2, "hiden"),
        (["export", "--arch", "mlp", "--formats", "onxx"], 2, "unknown format 'onxx'"),
        (["export", "--arch", "mlp", "--head", "d2=5"], 2, "tier=labels, for example w1.00-d2=5"),
        (["export", "--arch", "mlp", "--models", "none.py"], 2, "none.py"),
        (
            ["export", "--arch", "mlp", "--optimizer", "adamv"],
            2,
            "unknown optimizer 'adamv' (did you mean 'adam'?)",
        ),
        (
            ["export", "--arch", "mlp", "--optimizer-set", "beta1=1"],
            2,
            "the optimizer sgd has no parameter 'beta1'",
        ),
        (
            ["export", "--arch", "mlp", "--optimizer", "adam", "--momentum", "0.5"],
            2,
            "has no parameter 'momentum'",
        ),
        (["export", "--arch", "mlp", "--loss", "hubber"], 2, "unknown loss 'hubber'"),
        (["export", "--arch", "mlp", "--clip-norm", "-1"], 2, "clip_norm"),
        (["export", "--arch", "mlp", "--recipe", "none.toml"], 2, "none.toml"),
        (["run", "--config", "none.toml"], 2, "none.toml"),
        (["status", "--store", "nowhere"], 7, "nowhere"),
        (["demo", "--data", "minst"], 2, "digits, mnist"),
        (["up"], 2, "there is no fleet.toml in this folder"),
        (["run"], 2, "or create a project: `shoal init NAME --template vision`"),
        (["device", "run"], 2, "on the server's computer, `shoal enroll NAME` writes one"),
        (["enroll", "pi-1"], 2, "name that folder with --folder, or create one: `shoal init NAME"),
        (["init", "lab", "--broker", "broker.lab"], 2, "(did you mean 'mqtts://broker.lab'?)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_one_message_and_an_exit_code(typed, arguments, code, says):
    """No traceback: what is wrong, what to do, and a code a script can read."""
    done = typed(*arguments)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert done.stderr.startswith("error:")


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        (["--canary", "500%"], "500% is not"),
        (["--canary", "0"], "not a percentage above 0"),
        (["--stage", "-5"], "not a percentage above 0"),
        (["--stage", "some"], "'--stage'"),
        (["--canary", "5%", "--stage", "5"], "both set the stages; give only one of them"),
        (["--canary", "5%"], "flash.toml"),  # which is not there
    ],
)
def test_stages_of_a_rollout_are_shares_of_the_boards(typed, stages, says):
    """Nothing is signed for a share that is none."""
    done = typed("rollout", "start", "flash.toml", *stages)
    assert done.returncode == 2
    assert says in done.stderr


def test_a_typo_in_the_fleet_configuration_is_named(folder, typed):
    """An unknown key is an error with a suggestion, before anything is started."""
    edit(folder / "fleet.toml", "[model]", "[round]\nrouds = 3\n[model]")
    done = typed("run", "--config", "fleet.toml")
    assert done.returncode == 2
    assert "'round.rouds'; did you mean 'rounds'" in done.stderr


def test_a_typo_in_the_device_configuration_is_named(folder, typed):
    """The same on the board."""
    edit(folder / "device.toml", "state_dir", "stat_dir")
    done = typed("device", "run", "--config", "device.toml")
    assert done.returncode == 2
    assert "did you mean 'state_dir'" in done.stderr


def test_a_typo_in_a_table_of_data_is_named(folder, typed):
    """Among the keys of its kind of source."""
    edit(folder / "device.toml", 'kind = "npz"', 'kind = "npz"\nxkey = "x"')
    done = typed("device", "run", "--config", "device.toml")
    assert (done.returncode, "xkey'; did you mean 'x_key'?" in done.stderr) == (2, True), (
        done.stderr
    )


def test_missing_data_folder_is_named(folder, typed):
    """A board without its data ends with the code for data and the path."""
    (folder / "data.npz").unlink()
    done = typed("device", "run", "--config", "device.toml")
    assert done.returncode == 4
    assert "data.npz" in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["run", "--config", "fleet.toml"],
        pytest.param(["up", "--config", "fleet.toml"], marks=pytest.mark.slow),
        ["device", "run", "--config", "device.toml"],
    ],
)
def test_a_broker_that_is_down_is_named(folder, command):
    """Server and board both say where nothing answered, within their timeout."""
    done = shoal(*command, cwd=folder, timeout=30)
    assert done.returncode == 5, done.stderr
    assert "cannot connect to the broker at mqtt://127.0.0.1" in done.stderr


def test_mnist_without_its_folder_says_what_to_set(typed, monkeypatch):
    """The demo on MNIST names SHOAL_DATA."""
    monkeypatch.delenv("SHOAL_DATA", raising=False)
    done = typed("demo", "--data", "mnist")
    assert done.returncode == 4
    assert "SHOAL_DATA" in done.stderr
