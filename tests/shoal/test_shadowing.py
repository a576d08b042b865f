"""In a folder whose files have the names of Shoal's packages, everything runs; what cannot is told
which file it is.
"""

import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fleet_protocol.child_process import python_module
from shoal.packages import OWN_PACKAGES
from tests.brokers import free_port

ROOT = Path(__file__).parents[2]
SHOAL = Path(sys.executable).with_name("shoal")
PYTHON = sys.executable
NAMES = [
    "broker_server",
    "device_runtime",
    "fleet_protocol",
    "models",
    "reproduction",
    "simulation",
    "trainer_export",
]
SIMULATION = """
out = "runs"
[model]
arch = "mlp"
[data]
name = "digits"
train_limit = 60
[devices]
count = 2
[round]
rounds = 1
[engine]
kind = "{kind}"
workers = 1
"""
FLEET = """
fleet = "t"
store = "store"
[broker]
port = {port}
[model]
artifacts = "artifacts"
arch = "mlp"
"""


@pytest.fixture
def folder(tmp_path):
    """A user's folder: each file is innocent, and none of Shoal's business."""
    for name in [*NAMES, "random", "numpy", "ray"]:
        (tmp_path / f"{name}.py").write_text(
            "raise SystemExit('a file of the user was imported')\n"
        )
    (tmp_path / "fleet.toml").write_text(FLEET.format(port=free_port()))
    return tmp_path


def run(*command, cwd, path=()):
    """Run a command in a folder; ``path`` is added to that of the tests."""
    places = [*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if places:
        env["PYTHONPATH"] = os.pathsep.join(places)
    return subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=env,
    )


def test_the_list_of_packages_is_that_of_the_wheel():
    """What is looked for beside `shoal` is what is installed beside it."""
    listed = (
        (ROOT / "pyproject.toml")
        .read_text()
        .split("[tool.setuptools.packages.find]")[1]
        .split("]")[0]
    )
    assert set(re.findall(r'"(\w+)\*"', listed)) == {*OWN_PACKAGES, "shoal"}


# A simulation exports, too, in the same process, and starts workers.
@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        pytest.param([SHOAL], ["reproduce", "--list"], id="shoal reproduce"),
        pytest.param(
            [SHOAL],
            ["export", "--arch", "mlp", "--set", "input_shape=1,4,4", "--formats", "onnx"],
            id="shoal export",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [PYTHON, "-m", "shoal"],
            ["simulate", "--config", "sim.toml"],
            id="python -m shoal simulate",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.slow
def test_commands_run_in_a_folder_with_such_files(folder, program, arguments):
    """The working folder is the user's; neither the command nor its workers import from it."""
    (folder / "sim.toml").write_text(SIMULATION.format(kind="local"))
    done = run(*program, *arguments, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_actors_of_ray_run_there_too(folder):
    """Ray would let its actors import from the folder of the driver."""
    pytest.importorskip("ray")
    (folder / "sim.toml").write_text(SIMULATION.format(kind="ray"))
    done = run(SHOAL, "simulate", "--config", "sim.toml", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_embedded_broker_starts_there(folder):
    """`shoal up` has a child process; it listens, and ends when it is told to."""
    process = subprocess.Popen(
        [SHOAL, "up", "--config", "fleet.toml"], cwd=folder, stderr=subprocess.PIPE, text=True
    )
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    try:
        greeting = process.stderr.readline()
    finally:
        process.terminate()
        rest = process.communicate()[1]
        watchdog.cancel()
    assert "fleet t at mqtt://127.0.0.1" in greeting, greeting + rest
    assert process.returncode == 0


def test_a_device_of_a_local_fleet_starts_there(folder):
    """The agent's own module is found, and nothing of the user's."""
    done = run(*python_module("device_runtime", "--help"), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Run this board as a device of a Shoal fleet" in done.stdout


def test_a_child_finds_the_code_of_its_parent(tmp_path):
    """Also where that lies in a folder of its own, as in a checkout that is not installed: there
    the parent found it because it was the working folder, which the child does not look into.
    """
    shutil.copytree(ROOT / "fleet_protocol", tmp_path / "fleet_protocol")
    (tmp_path / "fleet_protocol" / "where.py").write_text(
        "import sys; print(__file__, sys.argv[1:])"
    )
    command = (
        "from fleet_protocol.child_process import python_module; "
        "print(python_module('fleet_protocol.where', 'a'))"
    )
    bare = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    made = subprocess.run(
        [PYTHON, "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True, env=bare
    )
    child = subprocess.run(
        eval(made.stdout), cwd="/", capture_output=True, text=True, check=False, env=bare
    )
    assert child.stdout == f"{tmp_path}/fleet_protocol/where.py ['a']\n", child.stderr


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["file", "package"])
def test_a_hidden_package_is_named_with_the_file_that_hides_it(tmp_path, name, kind):
    """Python puts a script's folder first; then Shoal cannot import what it needs, and says whose
    fault that is.
    """
    culprit = tmp_path / (f"{name}.py" if kind == "file" else f"{name}/__init__.py")
    culprit.parent.mkdir(exist_ok=True)
    culprit.write_text("")
    (tmp_path / "train.py").write_text("from shoal import Cut\n")
    done = run(PYTHON, "train.py", cwd=tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: {culprit} shadows the package `{name}` of Shoal")
    assert "rename" in last


def test_the_command_says_it_in_one_line(tmp_path):
    """PYTHONPATH can put a folder before everything; that is a wrong setting, not a bug."""
    (tmp_path / "models.py").write_text("")
    done = run(PYTHON, "-m", "shoal", "status", cwd="/", path=[tmp_path])
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"error: {tmp_path}/models.py shadows the package `models` of Shoal"
    )
    assert len(done.stderr.splitlines()) == 1


def test_a_module_of_the_user_that_is_loaded_already_is_named_too(tmp_path):
    """It stands in the place of ours, whatever the path says by now."""
    (tmp_path / "models.py").write_text("")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import models; del sys.path[0]; "
        f"from shoal import Cut"
    )
    done = run(PYTHON, "-c", code, cwd="/")
    assert f"ImportError: {tmp_path}/models.py shadows the package `models` of Shoal" in done.stderr
