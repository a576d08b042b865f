"""The notebooks of `examples/notebooks` run from top to bottom, and show the output of a run."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents.notebooks import code_cells, notebooks, run_cell, text_of, value_of
from tests.own_strategies import block
from tests.simulation.data_folder import FOLDER, needs, needs_minilm

NOTEBOOKS = notebooks()

IN_ITS_OWN = """
import json, sys
from tests.documents.notebooks import run_cell
names = {"__name__": "notebook"}
for source in json.loads(sys.stdin.read()):
    shown = run_cell(source, names)
print(json.dumps(shown))
"""


def code_of(path):
    return ["".join(cell["source"]) for cell in code_cells(path)]


def stored(name):
    """The cells of a notebook, with the output of the run that was stored."""
    (path,) = [path for path in NOTEBOOKS if path.stem == name]
    return code_cells(path)


def run(name, tmp_path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "notebook"}
    (path,) = [path for path in NOTEBOOKS if path.stem == name]
    values = [run_cell(source, names) for source in code_of(path)]
    return names, values[-1]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_its_output(path):
    """Every cell was run in order; each notebook shows a value, and a picture if it draws one."""
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert value_of(cells[-1]) is not None
    for cell in cells:
        source = "".join(cell["source"])
        pictures = [output for output in cell["outputs"] if output["output_type"] == "display_data"]
        assert len(pictures) == source.count("plt.subplots(")
        assert bool(text_of(cell)) == ("print(" in source)


def test_each_has_a_test():
    """A notebook that no test runs will break at some time."""
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
    cells = stored("slice_and_merge")
    assert capsys.readouterr().out == text_of(cells[0])
    assert shown == value_of(cells[-1])


@pytest.mark.slow
def test_three_methods_learn(tmp_path, monkeypatch):
    """Each far above chance."""
    _, shown = run("compare_methods", tmp_path, monkeypatch)
    assert len(shown) == 3
    assert min(shown.values()) > 0.5
    assert value_of(stored("compare_methods")[-1]) == pytest.approx(shown, abs=0.05)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_strategy_of_ones_own_is_found(tmp_path):
    """In a separate process; the file is the one of docs/strategies.md."""
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
    assert list(value_of(stored("own_strategy")[-1])) == [0.0, 1.0]
    assert len(set(shown.values())) > 1  # the power counts
    assert min(shown.values()) > 0.5


@pytest.mark.slow
@needs_minilm
@needs("sst2")
def test_ranks_are_unequal(tmp_path, monkeypatch):
    """Only adapters and head are trained and sent."""
    monkeypatch.setenv("SHOAL_DATA", str(FOLDER))
    names, (name, shape) = run("unequal_ranks", tmp_path, monkeypatch)
    assert 8 in shape
    assert value_of(stored("unequal_ranks")[-1]) == (name, shape)
    assert names["result"].finished.status == "finished"
