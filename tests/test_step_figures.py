"""The table of steps in `docs/benchmarks/steps.md` is that of the stored benchmarks."""

import csv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
XEON = "Intel Xeon"
HEADS = [
    "model",
    "of eager",
    "quartiles",
    "load",
    "budget",
    "on a Xeon",
    "of fused",
    "of compiled",
    "of ort-training",
]


def entries():
    """What was measured of steps, by name and what they were measured against, oldest first."""
    found = {}
    with (ROOT / "benchmarks" / "history.csv").open(newline="") as file:
        for entry in csv.DictReader(file):
            kind, _, name = entry["name"].partition(", ")
            if kind.startswith("step device/") and entry["value"]:
                found.setdefault((name, kind.removeprefix("step device/")), []).append(entry)
    return found


def table():
    section = (
        (ROOT / "docs" / "benchmarks" / "steps.md")
        .read_text()
        .partition("## Training steps")[2]
        .partition("\n## ")[0]
    )
    return [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in section.splitlines()
        if line[:1] == "|"
    ]


def shown(entry):
    quartiles = f"{float(entry['low']):.3f} to {float(entry['high']):.3f}"
    return [f"{float(entry['value']):.3f}", quartiles, entry["load"], entry["budget"]]


def test_the_table_has_its_columns():
    assert table()[0] == HEADS
    assert len(table()) > 10


@pytest.mark.parametrize("row", table()[2:], ids=lambda row: row[0])
def test_each_row_is_one_that_was_measured(row):
    """Against eager with quartiles, load and budget of the same run; against the others a figure of
    any run.
    """
    known = entries()
    eager = known[row[0], "eager"]
    assert row[1:5] in [shown(entry) for entry in eager if entry["cpu"] != XEON]
    assert row[5] in [f"{float(entry['value']):.3f}" for entry in eager if entry["cpu"] == XEON]
    for other, cell in zip(("fused", "compiled", "ort-training"), row[6:], strict=True):
        values = [f"{float(entry['value']):.3f}" for entry in known.get((row[0], other), ())]
        assert cell in values or (cell == "-" and not values)


SHARE_WAYS = ("step/whole", "step/eager", "memory/whole", "memory/eager", "upload/whole")
"""What the columns of the table of trained shares compare."""


def share_rows():
    section = (
        (ROOT / "docs" / "benchmarks" / "steps.md")
        .read_text()
        .partition("## Trained shares")[2]
        .partition("\n## ")[0]
    )
    rows = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        # The table of kept outputs has fewer columns.
        if line.startswith(("| half of ", "| head of ")) and len(cells) > len(SHARE_WAYS):
            rows.append(cells)
    return rows


def share_values():
    """Values of the stored benchmarks of shares, by the name of the row."""
    found = {}
    with (ROOT / "benchmarks" / "history.csv").open(newline="") as file:
        for entry in csv.DictReader(file):
            if entry["name"].startswith("share, ") and entry["value"]:
                values = found.setdefault(entry["name"], [])
                values.append(f"{float(entry['value']):#.3g}")
    return found


def test_every_share_of_every_net_is_in_the_table():
    names = {f"share, step/whole, {row[0]}" for row in share_rows()}
    assert names == {name for name in share_values() if name.startswith("share, step/whole")}


@pytest.mark.parametrize("row", share_rows(), ids=lambda row: row[0])
def test_each_share_is_one_that_was_measured(row):
    """In the order of the columns."""
    known = share_values()
    for way, cell in zip(SHARE_WAYS, row[1:], strict=True):
        assert cell in known[f"share, {way}, {row[0]}"]
