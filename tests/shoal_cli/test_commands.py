"""The commands as a user types them: results, JSON, error messages and exit codes, in real processes."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.brokers import free_port

SHOAL = Path(sys.executable).with_name("shoal")


def shoal(*arguments, cwd, timeout=120):
    return subprocess.run(
        [SHOAL, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False
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
    for command in ("export", "up", "run", "device", "status", "devices", "rounds", "log", "export-weights", "demo"):
        assert command in listed


def test_export_prints_a_table_and_json(tmp_path):
    """One row per tier, and the same as JSON; the set is on disk under its names."""
    command = ["export", "--arch", "mlp", "--widths", "1,1/4", "--set", "input_shape=1,4,4", "--formats", "onnx"]
    table = shoal(*command, cwd=tmp_path)
    assert table.returncode == 0, table.stderr
    assert "w0.25-d1" in table.stdout
    rows = json.loads(shoal(*command, "--json", cwd=tmp_path).stdout)
    assert [row["tier"] for row in rows] == ["w1.00-d1", "w0.25-d1"]
    assert all(0 <= row["worst_deviation"] < 1e-4 for row in rows)
    assert (tmp_path / "artifacts" / "mlp" / "w0.25-d1" / "train.onnx").is_file()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["export", "--arch", "mpl"], 2, "did you mean 'mlp'"),
        (["export", "--arch", "mlp", "--widths", "1,2"], 2, "not in (0, 1]"),
        (["export", "--arch", "mlp", "--depths", "9"], 2, "depth"),
        (["export", "--arch", "mlp", "--set", "hiden=3"], 2, "hiden"),
        (["export", "--arch", "mlp", "--formats", "onxx"], 2, "no format 'onxx'"),
        (["export", "--arch", "mlp", "--head", "d2=5"], 2, "tier=labels, for example w1.00-d2=5"),
        (["export", "--arch", "mlp", "--models", "none.py"], 2, "none.py"),
        (["run", "--config", "none.toml"], 2, "none.toml"),
        (["status", "--store", "nowhere"], 7, "nowhere"),
        (["demo", "--data", "minst"], 2, "digits, mnist"),
        (["up"], 2, "--config fleet.toml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_one_message_and_an_exit_code(tmp_path, arguments, code, says):
    """No traceback: what is wrong, what to do, and a code a script can read."""
    done = shoal(*arguments, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert done.stderr.startswith("error:")
    assert "Traceback" not in done.stderr


def test_a_typo_in_the_fleet_configuration_is_named(folder):
    """An unknown key is an error with a suggestion, before anything is started."""
    edit(folder / "fleet.toml", "[model]", "[round]\nrouds = 3\n[model]")
    done = shoal("run", "--config", "fleet.toml", cwd=folder)
    assert done.returncode == 2
    assert "'round.rouds'; did you mean 'rounds'" in done.stderr


def test_a_typo_in_the_device_configuration_is_named(folder):
    """The same on the board."""
    edit(folder / "device.toml", "state_dir", "stat_dir")
    done = shoal("device", "run", "--config", "device.toml", cwd=folder)
    assert done.returncode == 2
    assert "did you mean 'state_dir'" in done.stderr


def test_missing_data_folder_is_named(folder):
    """A board without its data ends with the code for data and the path."""
    (folder / "data.npz").unlink()
    done = shoal("device", "run", "--config", "device.toml", cwd=folder)
    assert done.returncode == 4
    assert "data.npz" in done.stderr


@pytest.mark.parametrize(
    "command",
    [["run", "--config", "fleet.toml"], ["up", "--config", "fleet.toml"], ["device", "run", "--config", "device.toml"]],
)
def test_a_broker_that_is_down_is_named(folder, command):
    """Server and board both say where nothing answered, within their timeout."""
    done = shoal(*command, cwd=folder, timeout=30)
    assert done.returncode == 5, done.stderr
    assert "cannot connect to the broker at mqtt://127.0.0.1" in done.stderr


def test_mnist_without_its_folder_says_what_to_set(tmp_path):
    """The demo on MNIST names SHOAL_DATA."""
    done = subprocess.run(
        [SHOAL, "demo", "--data", "mnist"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={},
    )
    assert done.returncode == 4
    assert "SHOAL_DATA" in done.stderr
