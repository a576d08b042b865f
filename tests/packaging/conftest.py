"""The wheel that users get, built once, and empty environments into which one extra of it is
installed.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def surroundings():
    """The environment's variables without those that let the tests' own packages in."""
    return {
        key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "VIRTUAL_ENV"}
    }


def pip(*arguments, python=None):
    """Run pip, for another environment if its Python is named; what it says comes back."""
    into = [] if python is None else ["--python", str(python)]
    command = [sys.executable, "-m", "pip", *into, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env=surroundings()
    )


@pytest.fixture(scope="session")
def index(tmp_path_factory):
    """Whether there is an index to install from."""
    reach = pip(
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        tmp_path_factory.mktemp("reach"),
        "flatbuffers>=25",
    )
    if reach.returncode:
        pytest.skip(f"pip reaches no index: {reach.stderr.strip()[-200:]}")


@pytest.fixture(scope="session")
def wheel(index, tmp_path_factory):
    """Built from a copy, so that nothing is left in the checkout, and tests that run side by side
    do not meet.
    """
    source = tmp_path_factory.mktemp("source")
    out = tmp_path_factory.mktemp("wheel")
    packages = re.findall(r'"(\w+)\*"', (ROOT / "pyproject.toml").read_text())
    for name in [*packages, "tests", "benchmarks"]:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (source / "build" / "lib" / "shoal").mkdir(
        parents=True
    )  # of an earlier build, whose modules are no more
    (source / "build" / "lib" / "shoal" / "gone.py").touch()
    done = pip("wheel", "--quiet", "--no-deps", "--wheel-dir", out, source)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("shoal-*.whl")
    return built


@dataclass(frozen=True)
class Environment:
    """A virtual environment that holds the wheel and one extra."""

    folder: Path

    def program(self, name):
        return self.folder / "bin" / name

    def start(self, *command, cwd, **options):
        """Start a program of it, with nothing of the tests' own environment."""
        path = [str(self.program(command[0])), *map(str, command[1:])]
        return subprocess.Popen(
            path, cwd=cwd, env={**surroundings(), "COLUMNS": "200"}, text=True, **options
        )

    def run(self, *command, cwd, timeout=400):
        """Run one to its end, and return what it printed; it must end well."""
        done = self.tried(*command, cwd=cwd, timeout=timeout)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def tried(self, *command, cwd, timeout=400):
        """Run one to its end, whatever that is."""
        with self.start(
            *command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            try:
                stdout, stderr = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


@pytest.fixture
def install(wheel, tmp_path_factory):
    """Make an environment with one extra, or with none; it is removed when the test ends."""
    made = contextlib.ExitStack()

    def make(extra="", python=sys.executable):
        folder = tmp_path_factory.mktemp(extra or "bare")
        made.callback(shutil.rmtree, folder, ignore_errors=True)
        # The pip of the tests installs: another one in each environment took as long as most extras
        # do.
        venv = [str(python), "-m", "venv", "--without-pip", str(folder)]
        subprocess.run(venv, check=True, capture_output=True, timeout=300)
        place = f"{wheel}[{extra}]" if extra else str(wheel)
        constraints = ["--constraint", ROOT / "constraints.txt"]
        done = pip(
            "install",
            "--quiet",
            "--no-compile",
            *constraints,
            place,
            python=folder / "bin" / "python",
        )
        assert done.returncode == 0, done.stderr
        return Environment(folder)

    with made:
        yield make
