"""The notebooks of `examples/notebooks` run from top to bottom, as they stand, and are stored
without any output.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.own_strategies import block
from tests.simulation.data_folder import FOLDER, needs, needs_minilm

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.ipynb"))

IN_ITS_OWN = """
import json, sys
from tests.test_notebooks import last_value
names = {"__name__": "notebook"}
for source in json.loads(sys.stdin.read()):
    shown = last_value(source, names)
print(json.dumps(shown))
"""


def code_of(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    return ["".join(cell["source"]) for cell in cells]


def last_value(source, names):
    """Run a cell; what its last line is, as a notebook shows it."""
    body = ast.parse(source)
    shown = ast.Expression(body.body.pop().value) if isinstance(body.body[-1], ast.Expr) else None
    exec(compile(body, "cell", "exec"), names)
    return None if shown is None else eval(compile(shown, "cell", "eval"), names)


def run(name, tmp_path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "notebook"}
    (path,) = [path for path in NOTEBOOKS if path.stem == name]
    values = [last_value(source, names) for source in code_of(path)]
    return names, values[-1]


def test_each_has_a_test():
    """What nobody runs is wrong some day."""
    assert [path.stem for path in NOTEBOOKS] == [
        "compare_methods",
        "own_strategy",
        "slice_and_merge",
        "unequal_ranks",
    ]
    for path in NOTEBOOKS:
        assert f'"{path.stem}"' in Path(__file__).read_text().partition("def test_slicing")[2]
        for source in code_of(path):
            ast.parse(source)


@pytest.mark.slow
def test_slicing_and_merging(tmp_path, monkeypatch, capsys):
    """Entries are means over one, two and three boards; the wide board's share is the largest."""
    _, shown = run("slice_and_merge", tmp_path, monkeypatch)
    assert shown == pytest.approx([(1 + 0.5 + 0.25) / 3, (1 + 0.5) / 2, 1.0], abs=1e-4)
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.slow
def test_three_methods_learn(tmp_path, monkeypatch):
    """Each far above chance."""
    _, shown = run("compare_methods", tmp_path, monkeypatch)
    assert len(shown) == 3
    assert min(shown.values()) > 0.5


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_strategy_of_ones_own_is_found(tmp_path):
    """In a process of its own; the file is the one of docs/strategies.md."""
    pytest.importorskip("fastapi")
    (path,) = [path for path in NOTEBOOKS if path.stem == "own_strategy"]
    sources = code_of(path)
    assert ast.parse(sources[1]).body[0].value.args[0].value == block("fedpower.py")
    environment = {
        **os.environ,
        "MPLBACKEND": "Agg",
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    done = subprocess.run(
        [sys.executable, "-c", IN_ITS_OWN], input=json.dumps(sources), cwd=tmp_path, env=environment,
        capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout.splitlines()[-1])
    assert list(shown) == ["0.0", "1.0"]
    assert len(set(shown.values())) > 1  # the power counts
    assert min(shown.values()) > 0.5


@pytest.mark.slow
@needs_minilm
@needs("sst2")
def test_ranks_are_unequal(tmp_path, monkeypatch):
    """The adapters alone train and travel."""
    monkeypatch.setenv("SHOAL_DATA", str(FOLDER))
    names, (_, shape) = run("unequal_ranks", tmp_path, monkeypatch)
    assert 8 in shape
    assert names["result"].finished.status == "finished"
