"""Earlier measurements, from benchmarks/history.csv: a line for each row of each run."""

import csv
import os
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from benchmarks.child import REPOSITORY
from benchmarks.row import Row
from device_runtime.board import machine_name, probe

HISTORY = Path(__file__).parent / "history.csv"
FIELDS = (
    "date",
    "commit",
    "cpu",
    "cores",
    "load",
    "name",
    "value",
    "low",
    "high",
    "unit",
    "budget",
)
ALONE = 0.1  # share by which two figures that were each taken once may differ

Entry = Mapping[str, str]


def before(path: Path = HISTORY) -> dict[str, list[Entry]]:
    """The entries of machines of this kind by the names of rows, oldest first."""
    entries: defaultdict[str, list[Entry]] = defaultdict(list)
    if not path.is_file():
        return {}
    here = (machine_name(), str(probe().cores))
    with path.open(newline="") as file:
        for entry in csv.DictReader(file):
            machine = (entry["cpu"], entry["cores"])
            # A row that was skipped has no value.
            if machine == here and entry["value"]:
                entries[entry["name"]].append(entry)
    return dict(entries)


def keep(rows: Sequence[Row], path: Path = HISTORY) -> None:
    """Add rows, those that were skipped with the reason as their unit."""
    described = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(
        described, capture_output=True, text=True, check=False, cwd=REPOSITORY
    ).stdout.strip()
    run = (
        datetime.now(timezone.utc).date().isoformat(),
        commit,
        machine_name(),
        probe().cores,
        f"{os.getloadavg()[0]:.1f}",
    )
    new = not path.is_file()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([FIELDS] if new else [])
        for row in rows:
            numbers = map(_number_text, (row.value, row.low, row.high))
            writer.writerow(
                (
                    *run,
                    row.name,
                    *numbers,
                    row.unit,
                    "" if row.budget is None else row.budget,
                )
            )


def _number_text(number: float | None) -> str:
    return "" if number is None else f"{number:.6g}"


def worse(row: Row, entry: Entry) -> bool:
    """Return whether a row is worse than an entry by more than the spread of both."""
    if row.value is None:
        return False
    if row.low is None or row.high is None or not entry["low"]:
        before = float(entry["value"])
        change = row.value - before
        if row.at_least:
            change = -change
        return change > ALONE * abs(before)
    if row.at_least:
        return row.high < float(entry["low"])
    return row.low > float(entry["high"])
