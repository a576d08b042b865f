"""What users import from ``shoal``: few names, each documented, typed, with an example that runs,
and loaded late.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shoal

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text()
HEAVY = {"torch", "onnx", "onnxruntime", "sqlalchemy", "matplotlib", "sklearn", "pyarrow", "paho"}
TABLE = {
    name: cells[-1].strip()
    for row in re.findall(r"^\| `.*\|$", PAGE, re.MULTILINE)
    for cells in [row.strip("| ").split("|")]
    for name in re.findall(r"`(\w+)`", cells[0])
}


def test_the_names_are_few_and_stated_once_for_python_and_once_for_type_checkers():
    """38 at most; what runs and what mypy reads are the same objects from the same modules."""
    assert 10 <= len(shoal.__all__) <= 38
    (typed,) = (
        node
        for node in ast.parse(Path(shoal.__file__).read_text()).body
        if isinstance(node, ast.If)
    )
    seen = {
        alias.asname or alias.name: f"{node.module}:{alias.name}" if alias.asname else node.module
        for node in typed.body
        for alias in node.names
    }
    assert seen == shoal._PLACES
    assert set(seen) == set(shoal.__all__)
    assert set(shoal.__all__) <= set(dir(shoal))


def test_each_name_is_there_and_documented():
    """A docstring where it is defined, a row in the table of docs/api.md, and a line of an
    example.
    """
    examples = "\n".join(re.findall(r"^    (?:>>>|\.\.\.) (.*)$", PAGE, re.MULTILINE))
    assert set(TABLE) == set(shoal.__all__)
    for name in shoal.__all__:
        assert getattr(shoal, name).__doc__, name
        assert re.search(rf"import .*\b{name}\b", examples), name
        assert len(re.findall(rf"\b{name}\b", examples)) > 1, name


def test_a_name_that_there_is_not_is_an_attribute_error():
    """As with any module, so that hasattr and friends work."""
    assert not hasattr(shoal, "archtecture")


@pytest.mark.slow
def test_the_examples_run(tmp_path):
    """In an empty folder, one after the other, with the results that the page shows."""
    command = [sys.executable, "-m", "doctest", ROOT / "docs" / "api.md"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert PAGE.count(">>>") > 25


def test_importing_shoal_and_what_needs_no_extra_loads_nothing_heavy(tmp_path):
    """A board imports it without torch, a server without the exporter."""
    light = sorted(name for name, extra in TABLE.items() if extra == "none")
    assert len(light) > 5
    for names in ([], light):
        code = (
            f"import shoal, sys; [getattr(shoal, name) for name in {names}]; "
            f"print(sorted({HEAVY} & set(sys.modules)))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "[]", names


@pytest.mark.parametrize(
    ("name", "absent", "extra"),
    [
        ("export_architecture", "torch", "export"),
        ("Store", "sqlalchemy", "server"),
        pytest.param("simulate", "pyarrow", "simulate", marks=pytest.mark.slow),
    ],
)
def test_a_name_without_its_extra_says_which_to_install(tmp_path, name, absent, extra):
    """As the command does."""
    code = f"import sys; sys.modules['{absent}'] = None; from shoal import {name}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (
        f"shoal.{name} needs {absent}, which is not installed: pip install 'shoal[{extra}]'"
        in done.stderr
    )
