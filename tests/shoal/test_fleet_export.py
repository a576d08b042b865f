"""A fleet.toml that names its model needs no command for the export, and boards of this machine no
terminals.
"""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from broker_server.settings.fleet import FleetConfig
from fleet_protocol.configuration import load_config
from fleet_protocol.errors import ConfigError, DataError, TransportError
from models.layout import Layout
from shoal.cli.fleet_export import export_if_changed
from shoal.cli.serving import do_run, prepare_fleet
from tests.brokers import free_port

MODEL = """
from torch import nn
from shoal import Cut, architecture

@architecture()
def mine(cut: Cut, *, input_shape=(9,), classes=9, hidden=8) -> nn.Module:
    inner = cut.width("inner", hidden)
    return nn.Sequential(
        nn.Linear(input_shape[0], inner), nn.ReLU(), nn.Linear(inner, cut.classes(classes))
    )
"""
OWN_LOSS = """
from shoal import loss

@loss(shape=(2,))
def gap(outputs, targets):
    return ((outputs - targets) ** 2).mean(1)
"""
FLEET = """
fleet = "lab"
store = "store"
[broker]
port = {port}
[model]
arch = "mine"
[model.export]
models = "model.py"
widths = [1]
[round]
rounds = 1
wait_seconds = 60
[evaluation.data]
kind = "npz"
path = "test.npz"
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a model, a test set of four columns and three labels, and a fleet.toml."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "fleet.toml").write_text(FLEET.format(port=free_port()))
    draw = np.random.default_rng(1)
    x = draw.normal(size=(60, 4)).astype(np.float32)
    np.savez(tmp_path / "test.npz", x=x, y=np.arange(60) % 3)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def exported(folder):
    """Export if anything has changed, and return when the set was made, and its layout."""
    export_if_changed(load_config(folder / "fleet.toml", FleetConfig), folder / "fleet.toml")
    file = folder / "artifacts" / "mine" / "layout.json"
    return file.stat().st_mtime_ns, Layout.from_json(file.read_text())


def changed(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_shape_and_classes_come_from_the_test_set(project, capfd):
    """The table of the export does not mix with the result of the command."""
    _, layout = exported(project)
    assert dict(layout.settings) == {"input_shape": (4,), "classes": 3, "hidden": 8}
    tiers = {path.name for path in (project / "artifacts" / "mine").iterdir() if path.is_dir()}
    assert tiers == {"w1.00-d1"}
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "w1.00-d1" in printed.err


@pytest.mark.slow
def test_only_a_change_is_exported(project):
    """Of the model, a file beside it, or the table; a moved folder is none."""
    made, _ = exported(project)
    assert exported(project)[0] == made
    changed(project / "fleet.toml", "rounds = 1", "rounds = 2")
    assert exported(project)[0] == made
    moved = project.parent / "elsewhere"
    shutil.copytree(project, moved)
    before = (moved / "artifacts" / "mine" / "layout.json").stat().st_mtime_ns
    assert exported(moved)[0] == before
    changed(project / "model.py", "hidden=8", "hidden=12")
    again, layout = exported(project)
    assert again != made
    assert layout.settings["hidden"] == 12
    changed(
        project / "fleet.toml",
        "widths = [1]",
        "widths = [0.5]\nsettings = { hidden = 6, classes = 5 }",
    )
    _, layout = exported(project)
    assert (layout.settings["hidden"], layout.settings["classes"]) == (6, 5)
    assert not (project / "artifacts" / "mine" / "w1.00-d1").exists()


@pytest.mark.parametrize("what", ["contract", "numbers"])
def test_classes_are_those_of_the_contract_or_the_targets(project, what):
    """Names that the test set lacks count; of numbers, a model has one output for each."""
    if what == "contract":
        with (project / "fleet.toml").open("a") as file:
            file.write('[contract]\nlabels = ["a", "b", "c", "d"]\n')
        assert exported(project)[1].settings["classes"] == 4
        return
    with np.load(project / "test.npz") as data:
        np.savez(project / "test.npz", x=data["x"], y=np.zeros((60, 2), np.float32))
    changed(
        project / "fleet.toml",
        "[model.export]",
        '[model.recipe]\nloss = "mean-squared-error"\n[model.export]',
    )
    assert exported(project)[1].settings["classes"] == 2


def test_whole_targets_of_an_own_loss_of_numbers_are_no_labels(project):
    """The decorator of the loss says so: without it, 0 to 9 would be ten labels."""
    with np.load(project / "test.npz") as data:
        np.savez(project / "test.npz", x=data["x"], y=np.arange(120).reshape(60, 2) % 10)
    with (project / "model.py").open("a") as file:
        file.write(OWN_LOSS)
    changed(
        project / "fleet.toml",
        "[model.export]",
        '[model.recipe]\nloss = "gap"\n[model.export]',
    )
    assert exported(project)[1].settings["classes"] == 2


def test_what_prevents_an_export_is_named(project):
    """A file elsewhere is not run, and no data set leaves the shape unknown."""
    outside = project.parent / "outside.py"
    outside.write_text("raise SystemExit(99)\n")
    changed(project / "fleet.toml", '"model.py"', f'"{os.path.relpath(outside, project)}"')
    with pytest.raises(ConfigError, match=r"only Python files in the folder of the configuration"):
        prepare_fleet(project / "fleet.toml", None)
    changed(project / "fleet.toml", os.path.relpath(outside, project), "model.py")
    (project / "test.npz").unlink()
    with pytest.raises(DataError, match=r"test\.npz"):
        prepare_fleet(project / "fleet.toml", None)
    assert not (project / "artifacts" / "mine").exists()


def test_a_run_has_no_table_of_its_export(project):
    """So a store's run can resume where the table is no more, and no request can name a file."""
    assert prepare_fleet(project / "fleet.toml", None).model.export is None


def board(folder, name, data="test.npz", fleet="lab"):
    """The file of a board."""
    config = load_config(folder / "fleet.toml", FleetConfig)
    file = folder / f"{name}.toml"
    file.write_text(
        f'fleet = "{fleet}"\ndevice = "{name}"\n'
        f'broker = "mqtt://127.0.0.1:{config.broker.port}"\nstate_dir = "state/{name}"\n'
        f'[data]\nkind = "npz"\npath = "{data}"\n'
    )
    return file


def test_a_board_that_exits_ends_the_command_with_the_end_of_its_log(project):
    """It waited ten minutes for the board."""
    settings = prepare_fleet(project / "fleet.toml", None)
    file = board(project, "attic", data="nowhere.npz")
    with pytest.raises(TransportError, match=r"(?s)the board attic exited with code 4.*nowhere\."):
        do_run(settings, as_json=False, boards=[file])


def test_boards_of_another_fleet_and_twice_the_same_are_refused(project):
    """Before anything starts."""
    settings = prepare_fleet(project / "fleet.toml", None)
    other = board(project, "other", fleet="barn")
    with pytest.raises(ConfigError, match=r'other\.toml is of the fleet "barn", not of "lab"'):
        do_run(settings, as_json=False, boards=[other])
    file = board(project, "attic")
    with pytest.raises(ConfigError, match=r'are both of the device "attic"'):
        do_run(settings, as_json=False, boards=[file, file])
    assert not (project / "store").exists()


@pytest.mark.slow
def test_boards_train_and_end_with_the_run(project, capsys):
    """They stop in order, and their logs lie beside their files."""
    files = [board(project, name) for name in ("attic", "barn")]
    changed(project / "fleet.toml", "rounds = 1", "rounds = 1\nmin_devices = 2")
    settings = prepare_fleet(project / "fleet.toml", None)
    assert do_run(settings, as_json=True, boards=files) == 0
    assert '"status": "finished"' in capsys.readouterr().out
    for file in files:
        log = file.with_suffix(".log").read_text()
        assert "the server has the update" in log
        assert "state=stopped" in log


def test_a_board_that_cannot_be_read_is_named_before_the_export(project):
    """The export takes much longer than to read a file."""
    command = [sys.executable, "-m", "shoal", "run", "--board", "nope.toml"]
    ended = subprocess.run(
        command, cwd=project, capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode != 0
    assert "cannot read the configuration nope.toml" in ended.stderr
    assert not (project / "artifacts").exists()
