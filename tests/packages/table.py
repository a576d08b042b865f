"""Write the table of docs/packages.md from the stored run of the gallery.

`python -m tests.packages.table FILE...` stores JSON lines of `tests.packages.oracle` first.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests.packages.gallery import GALLERY

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "packages.md"
STORED = ROOT / "docs" / "benchmarks" / "data" / "packages.json"
_BEGIN = "| Model | Package | Axes |"
_HEAD = (
    f"{_BEGIN} Parameters | Discovery and proof | Export of three widths | Memory | Outputs | "
    "Step |\n|---|---|---|---|---|---|---|---|---|\n"
)


def stored_rows() -> list[dict[str, Any]]:
    """Return the stored measurements in the order of the gallery."""
    measured = {row["model"]: row for row in json.loads(STORED.read_text())}
    return [measured[entry.title] for entry in GALLERY if entry.title in measured]


def table() -> str:
    """Return the table of the page."""
    lines = [_line(row) for row in stored_rows()]
    return _HEAD + "\n".join(lines) + "\n"


def _line(row: dict[str, Any]) -> str:
    package = row["spec"].partition(":")[0].partition(".")[0]
    axes = ", ".join(f"`{call.removeprefix('cut.')}`" for call in row["axes"])
    parameters = ", ".join(f"{count:,}" for count in row["parameters"])
    step = row["deviation of a step"]
    cells = (
        row["model"],
        package,
        axes,
        parameters,
        f"{row['discovery seconds']} s",
        f"{row['export seconds']} s",
        f"{row['peak megabytes']} MB",
        f"{row['deviation of outputs']:.0e}",
        "" if step is None else f"{step:.0e}",
    )
    return f"| {' | '.join(cells)} |"


def with_table(text: str) -> str:
    """Return a page with the table of today."""
    before, _, behind = text.partition(_BEGIN)
    _, blank, after = behind.partition("\n\n")
    return before + table() + blank[1:] + after


def main() -> None:
    """Store new measurements, and write the page."""
    rows: dict[str, Any] = {}
    if STORED.exists():
        rows = {row["model"]: row for row in json.loads(STORED.read_text())}
    for path in sys.argv[1:]:
        for line in Path(path).read_text().splitlines():
            row = json.loads(line)
            rows[row["model"]] = row
    STORED.write_text(json.dumps([*rows.values()], indent=1) + "\n")
    PAGE.write_text(with_table(PAGE.read_text()))


if __name__ == "__main__":
    main()
