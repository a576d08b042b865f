"""The table of memory in `docs/benchmarks/steps.md` is that of the stored benchmarks."""

import csv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEADS = ["model", "weights", "device", "with plan", "PyTorch", "ratio", "with plan"]
KINDS = (
    "memory of weights, momentum and gradients",
    "memory of a device",
    "memory of a device with the smallest plan",
    "memory of PyTorch",
    "memory device/PyTorch",
    "memory device with the smallest plan/PyTorch",
)


def measured():
    """What was measured of each net, by kind, in the order of the runs."""
    runs = {}
    with (ROOT / "benchmarks" / "history.csv").open(newline="") as file:
        for entry in csv.DictReader(file):
            for kind in KINDS:
                name = entry["name"].removeprefix(f"{kind}, ")
                if name != entry["name"] and entry["value"]:
                    runs.setdefault(name, {}).setdefault(kind, []).append(float(entry["value"]))
    return runs


def table():
    """The cells of the table, with its head."""
    section = (ROOT / "docs" / "benchmarks" / "steps.md").read_text().partition("## Memory")[2]
    lines = section.partition("\n## ")[0].splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]


def test_the_table_has_its_columns():
    assert table()[0] == HEADS
    assert len(table()) > 5


@pytest.mark.parametrize("row", table()[2:], ids=lambda row: row[0])
def test_each_row_is_one_run(row):
    """All figures of a row are those of the same run of that net."""
    name, *cells = row
    runs = measured()[name]
    shown = []
    for values in zip(*(runs[kind] for kind in KINDS), strict=True):
        megabytes = [f"{value:.0f} MB" for value in values[:4]]
        shown.append([*megabytes, *(f"{value:.3f}" for value in values[4:])])
    assert cells in shown
