"""Reads the results of `shoal reproduce` in a folder: tables, and the stores of their runs."""

import csv
from contextlib import suppress
from pathlib import Path

Rows = list[dict[str, str]]

# Patterns below the folder of all results. Runs lie a few folders deeper than tables.
_TABLES = "*/*/*.csv"
_RUNS = "seed-*/store/shoal.db"
_MOST_LEVELS = 8
"""Bound on the folders between a store and the folder of all results."""
_MOST_BYTES = 10_000_000
"""Bound on the size of a table; the longest so far has 50 kB."""
_HEADER = "table,scale,arm,figure,"
NOTE = "note"
"""Name of the cell that says which data stands for the paper's; a table has no such column."""


def store_of(folder: Path) -> Path:
    """Return the store that a folder is, or in a folder of results that of the newest run."""
    if (folder / "shoal.db").exists() or not any(folder.glob(_TABLES)):
        return folder
    databases = list(folder.rglob(_RUNS))
    if not databases:
        return folder
    newest = max(databases, key=lambda path: path.stat().st_mtime)
    return newest.parent


def tables(store: Path) -> dict[str, Rows]:
    """Return the rows of the tables that the run of a store belongs to, by file.

    There are none for the store of anything but a run of `shoal reproduce`.
    """
    folder = _folder_of_results(store.resolve())
    if folder is None:
        return {}
    rows_by_file = {}
    for path in sorted(folder.glob(_TABLES)):
        # A table that is being written, or a file that is none, is left out.
        with suppress(OSError, ValueError, csv.Error):
            rows = _read_table(path)
            if rows is not None:
                rows_by_file[path.relative_to(folder).as_posix()] = rows
    return rows_by_file


def _folder_of_results(store: Path) -> Path | None:
    """Return the folder above a store that holds tables."""
    if not store.match("seed-*/*"):
        return None
    for folder in store.parents[:_MOST_LEVELS]:
        if any(folder.glob(_TABLES)):
            return folder
    return None


def _read_table(path: Path) -> Rows | None:
    """Read a table; None for another file."""
    with path.open(encoding="utf-8", newline="") as file:
        if path.stat().st_size > _MOST_BYTES or not file.readline().startswith(_HEADER):
            return None
        file.seek(0)
        rows = [_named_cells(row) for row in csv.DictReader(file)]
    note = _note(path.with_suffix(".md"))
    if note:
        for row in rows:
            row[NOTE] = note
    return rows


def _note(page: Path) -> str:
    """Return what the page of a table says of data that stands for the paper's; empty if nothing.

    The reports print it in bold, as a paragraph of its own.
    """
    notes = []
    with suppress(OSError, ValueError):
        for line in page.read_text(encoding="utf-8").splitlines():
            if line.startswith("**") and " stands for " in line:
                notes.append(line.strip("*"))
    return " ".join(notes)


def _named_cells(row: dict[str, str]) -> dict[str, str]:
    """Return the cells that have a column and are there; a short or long row lacks one of both."""
    return {name: cell for name, cell in row.items() if name and cell is not None}
