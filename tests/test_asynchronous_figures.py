"""The table of rounds that do not wait in `docs/rounds.md` is that of the stored runs, and keeps what was promised."""

import json
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
RUNS = json.loads((DOCS / "asynchronous.json").read_text())["runs"]
TARGETS = (0.95, 0.97)


def reached(run, accuracy):
    return next(seconds for seconds, found in zip(run["seconds"], run["accuracy"], strict=True) if found >= accuracy)


def of_seed(seed, buffer):
    return next(run for run in RUNS if (run["seed"], run["buffer"]) == (seed, buffer))


def test_the_table_is_that_of_the_stored_runs():
    """Seconds of the emulated clock until an accuracy, with and without waiting, for every seed."""
    section = (DOCS / "rounds.md").read_text().partition("## Rounds that do not wait")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line[:1] == "|"]
    expected = []
    for accuracy in TARGETS:
        for seed in (1, 2, 3):
            waited, went_on = (reached(of_seed(seed, buffer), accuracy) for buffer in (None, 4))
            expected.append([f"{accuracy:g}", str(seed), f"{waited:.0f}", f"{went_on:.0f}", f"{went_on / waited:.2f}"])
    assert cells[2:] == expected


def test_the_promised_time_is_kept():
    """At most 0.7 of the time of rounds that wait for the slow board."""
    for accuracy in TARGETS:
        for seed in (1, 2, 3):
            assert reached(of_seed(seed, 4), accuracy) <= 0.7 * reached(of_seed(seed, None), accuracy)
