"""The command is light: it lists what there is from docstrings, and loads a command's packages when
it is used.
"""

import ast
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shoal.cli.commands
from tests.marking import mostly_slow

FOLDER = Path(shoal.cli.commands.__file__).parent
COMMANDS = {
    path.stem.replace("_", "-"): path for path in FOLDER.glob("*.py") if path.stem != "__init__"
}
HEAVY = {
    "torch",
    "onnx",
    "onnxruntime",
    "sqlalchemy",
    "matplotlib",
    "sklearn",
    "pyarrow",
    "jinja2",
    "paho",
    "ray",
    "fastapi",
}

LOADED = """
import sys
from shoal.cli.main import app
for arguments in {calls}:
    try:
        app(arguments)
    except SystemExit as end:
        assert not end.code, arguments
print(sorted(name for name in {heavy} if name in sys.modules), file=sys.stderr)
"""
MISSING = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(name=name)

sys.meta_path.insert(0, Absent())
from shoal.cli.main import main
sys.argv = ["shoal", *{arguments}]
main()
"""


def python(code, *, cwd):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "COLUMNS": "300"},
    )  # fmt: skip


def test_help_lists_every_module_of_the_folder_with_its_docstring(tmp_path):
    """A command is a file in the folder and nothing else: name and help are the module's."""
    done = python(LOADED.format(calls=[["--help"]], heavy=HEAVY), cwd=tmp_path)
    rows = {
        line.split()[1]: " ".join(line.split()[2:-1])
        for line in done.stdout.splitlines()
        if line.count("│") == 2
    }
    assert len(COMMANDS) > 10
    for name, path in COMMANDS.items():
        paragraph = ast.get_docstring(ast.parse(path.read_text())).split("\n\n")[0]
        assert rows[name] == paragraph


@pytest.mark.parametrize(
    "calls",
    [
        [["--version"]],
        [["--help"]],
        [["device", "--help"]],
        [[name, "--help"] for name in COMMANDS],
    ],
    ids=["version", "help", "device", "help of each"],
)
def test_looking_loads_nothing_heavy(tmp_path, calls):
    """What is there and how it is called is said without the packages that do it."""
    done = python(LOADED.format(calls=calls, heavy=HEAVY), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"


@pytest.mark.slow  # where it is not watched how far tests reach, which costs as much again
def test_version_costs_half_a_second_of_cpu_at_most(tmp_path):
    """The best of three, user and system together."""

    def spent():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "shoal", "--version"],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(spent() for _ in range(3)) <= 0.5


@pytest.mark.parametrize(
    ("absent", "arguments", "extra"),
    mostly_slow(
        [
            ({"sqlalchemy"}, ["status"], "server"),
            ({"sqlalchemy"}, ["export-weights"], "server"),
            ({"sqlalchemy"}, ["up", "--fleet", "f"], "server"),
            ({"sqlalchemy"}, ["run", "--config", "fleet.toml"], "server"),
            ({"torch"}, ["export", "--arch", "mlp"], "export"),
            ({"torch"}, ["export-mutual", "--meme", "mlp", "--personal", "mlp"], "export"),
            ({"pyarrow"}, ["simulate", "--config", "sim.toml"], "simulate"),
            ({"torch"}, ["demo"], "demo"),
            ({"fastapi"}, ["view", "store"], "view"),
        ],
        lambda case: case[1][0] in {"status", "export", "simulate"},
    ),
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_without_its_extra_says_which_to_install(tmp_path, absent, arguments, extra):
    """One line that can be copied, and the exit code of a wrong configuration."""
    done = python(MISSING.format(absent=absent, arguments=arguments), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    (package,) = absent
    assert f"error: {package} is not installed here: pip install 'shoal[{extra}]'" in done.stderr


@pytest.mark.slow
def test_an_export_needs_no_packages_of_a_server(tmp_path):
    """Only a start from a store reads the store."""
    options = ["export", "--arch", "mlp", "--set", "hidden=4", "--widths", "1", "--formats", "onnx"]
    done = python(MISSING.format(absent={"sqlalchemy"}, arguments=options), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "shoal.db").touch()
    options += ["--start", "store", "--replace"]
    done = python(MISSING.format(absent={"sqlalchemy"}, arguments=options), cwd=tmp_path)
    assert done.returncode == 2
    assert "sqlalchemy is not installed here: pip install 'shoal[server]'" in done.stderr


def test_a_board_without_its_extra_says_which_to_install(tmp_path):
    """What carries messages is found by the broker's address, so this is said when the agent
    connects.
    """
    np.savez(tmp_path / "data.npz", x=np.zeros((8, 4), np.float32), y=np.arange(8) % 2)
    (tmp_path / "device.toml").write_text(
        'fleet = "t"\ndevice = "d"\nbroker = "mqtt://127.0.0.1:1"\nstate_dir = "state"\n'
        '[data]\nkind = "npz"\npath = "data.npz"\n'
    )
    done = python(
        MISSING.format(absent={"paho"}, arguments=["device", "run", "--config", "device.toml"]),
        cwd=tmp_path,
    )
    assert done.returncode == 2, done.stderr
    assert "paho is not installed here" in done.stderr
    assert "pip install 'shoal[device]'" in done.stderr
