"""The conformance run: published examples pass, other numbers pass, and a wrong expectation never
does.
"""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import Entry, read_entries, run_entry, run_file
from tests.conformance.__main__ import main
from tests.conformance.suite import Verdict
from tests.reproduction.worked_examples import other_numbers

VECTORS = Path(__file__).parents[3] / "shared" / "vectors" / "vectors.json"
SLOW = {"H5", "H10", "H12", "R5", "R9"}
# Rows of the published file that are there to recognise a deviation, which the product does not
# compute.
FOR_RECOGNITION = (
    "loss_if_minus_inf",
    "argmax_if_minus_inf",
    "quirk",
    "momentum_if_taken_before_injection",
    "sequential",
    "if_b_and_c_absent",
)


def published() -> list[dict[str, Any]]:
    return json.loads(VECTORS.read_text())["vectors"] if VECTORS.is_file() else []


def written(folder: Path, vectors: list[dict[str, Any]]) -> Path:
    path = folder / "examples.json"
    path.write_text(json.dumps({"version": 1, "vectors": vectors}))
    return path


def entry_of(raw: dict[str, Any], others: list[dict[str, Any]]) -> Entry:
    known = {
        item["id"].split("-")[0]: Entry(item["id"], item["inputs"], item["expected"], {})
        for item in others
        if item is not raw
    }
    return Entry(raw["id"], raw["inputs"], raw["expected"], known)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to every number, except those nobody computes."""
    if path and isinstance(path[-1], str) and path[-1].startswith(FOR_RECOGNITION):
        return []
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in leaves(item, (*path, key))]
    if isinstance(value, list):
        return [leaf for key, item in enumerate(value) for leaf in leaves(item, (*path, key))]
    return [path] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


def changed(value: float) -> float:
    """Wrong by a little: one unit, or a hundred-thousandth and no less than ten tolerances."""
    return value + 1 if isinstance(value, int) else value + max(1e-5, abs(value) * 1e-5)


def tampered(raw: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    wrong = copy.deepcopy(raw)
    place = wrong["expected"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = changed(place[path[-1]])
    return wrong


@pytest.mark.slow
@pytest.mark.skipif(
    not VECTORS.is_file(), reason=f"the published examples are not beside this checkout ({VECTORS})"
)
def test_published_examples_pass(capsys):
    """All 33 entries pass, each on its own line, and the command ends with 0."""
    assert main([str(VECTORS)]) == 0
    *lines, counts = capsys.readouterr().out.splitlines()
    assert len(lines) == 33
    assert all(": pass" in line for line in lines)
    assert counts == "33 entries: 33 pass, 0 FAIL, 0 not applicable"


@pytest.mark.parametrize("raw", other_numbers(), ids=lambda raw: raw["id"])
def test_other_numbers_pass(raw):
    """Examples computed in plain Python, from other inputs, pass as well."""
    outcome = run_entry(entry_of(raw, other_numbers()))
    assert outcome.verdict is Verdict.PASS, outcome.line


@pytest.mark.parametrize(
    ("raw", "siblings"),
    [
        pytest.param(raw, group, id=raw["id"])
        for group in (published(), other_numbers())
        for raw in group
    ],
)
@pytest.mark.slow
def test_wrong_expectations_fail(raw, siblings):
    """Whichever number an entry expects: if it is wrong, the entry fails and says what it expected
    and got.
    """
    every = leaves(raw["expected"])
    step = max(1, len(every) // (3 if raw["id"].split("-")[0] in SLOW else 25))
    for path in every[::step]:
        if raw["id"] == "H1-sizes" and path[0] == "odd":
            continue  # the next test
        outcome = run_entry(entry_of(tampered(raw, path), siblings))
        assert outcome.verdict is Verdict.FAIL, (path, outcome.line)
        assert "expected" in outcome.line
        assert "got" in outcome.line


def test_only_a_rounding_error_of_floats_is_excused():
    """100 x 0.07 keeps 7: an entry may say 8, which is plain ceil, but neither 6 nor 9, nor 8 of
    100 x 0.075.
    """
    raw = {
        "id": "H1-sizes",
        "inputs": {"K": [64], "rates": {"a": 1.0}, "odd": [[100, 0.07]]},
        "expected": {"levels": {"a": [64]}, "odd": [8]},
    }
    outcome = run_entry(entry_of(raw, []))
    assert outcome.verdict is Verdict.PASS
    assert "100 x 0.07 keeps 7" in outcome.line
    for odd, wrong in (([100, 0.07], 6), ([100, 0.07], 9), ([100, 0.075], 7), ([100, 0.08], 9)):
        raw["inputs"]["odd"], raw["expected"]["odd"] = [odd], [wrong]
        assert run_entry(entry_of(raw, [])).verdict is Verdict.FAIL


def test_unknown_entries_are_explained_and_incomplete_ones_fail(tmp_path, capsys):
    """An id nobody knows is not applicable; an entry that lacks something fails, and the run goes
    on.
    """
    path = written(
        tmp_path,
        [
            {"id": "Z9-unheard", "inputs": {}, "expected": {}},
            {"id": "H2-overlap", "inputs": {"W_global": [[1.0]]}, "expected": {}},
            {"id": "H9-fix", "inputs": {"cases": []}, "expected": {}},
            {"id": "F2-limits", "inputs": {"same": "F1"}, "expected": {}},
            {"id": "W2-quantise"},
            {
                "id": "R3-layers",
                "inputs": {"K": [4], "beta": 1.5, "j": 0},
                "expected": {"paper": [[0]], "code": [[0]]},
            },
            other_numbers()[0],
        ],
    )
    assert main([str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Z9-unheard: not applicable: ")
    assert [line.split(": ")[1][:4] for line in lines[1:3]] == ["FAIL", "FAIL"]
    assert lines[3].startswith("F2-limits: not applicable: ")
    assert lines[4].startswith("W2-quantise: FAIL expected ")
    assert lines[5].startswith("R3-layers: FAIL expected a result got the refusal: ")
    assert lines[6] == "H1-sizes: pass"
    assert lines[-1] == "7 entries: 1 pass, 4 FAIL, 2 not applicable"


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", '{"vectors": 3}', '{"vectors": [{"inputs": 1}]}']
)
def test_a_file_that_cannot_be_read_is_told_from_a_failure(tmp_path, capsys, text):
    """No file, no JSON, or another form: exit 2, with the file named."""
    path = tmp_path / "examples.json"
    if text is not None:
        path.write_text(text)
    assert main([str(path)]) == 2
    assert "examples.json" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_runs_as_a_module(tmp_path):
    """``python -m tests.conformance FILE.json`` prints lines and ends with the verdict."""
    path = written(
        tmp_path,
        [
            {
                "id": "W2",
                "inputs": {"U": [4.5], "theta": 9.0},
                "expected": {"Un": [0.5], "rate": [0.5]},
            }
        ],
    )
    done = subprocess.run(
        [sys.executable, "-m", "tests.conformance", str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "W2: FAIL expected 0.5 got 0.25 (rate[0])",
        "1 entries: 0 pass, 1 FAIL, 0 not applicable",
    ]


def test_results_of_a_file_keep_its_order(tmp_path):
    """The library gives what the command prints."""
    path = written(tmp_path, other_numbers())
    assert [outcome.id for outcome in run_file(path)] == [entry.id for entry in read_entries(path)]
