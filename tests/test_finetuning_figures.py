"""The table of `docs/finetuning.md` is that of the stored runs."""

import json
from collections import Counter
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_the_table_is_that_of_the_stored_runs():
    """Every run is a row with where it ran, its seed and its accuracies, and there are no other rows."""
    runs = json.loads((DOCS / "finetuning-sst2.json").read_text())["runs"]
    section = (DOCS / "finetuning.md").read_text().partition("## What we measured")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    rows = Counter(("fleet" in run, int(seed), accuracies) for run, seed, accuracies in cells[2:])
    assert rows == Counter(
        ("fleet" in run, run["seed"], ", ".join(f"{value:.4f}" for value in run["accuracy"])) for run in runs
    )
