"""Reads the results of `shoal reproduce` in a folder: tables, and the stores of their runs."""

import csv
import io
from contextlib import suppress
from pathlib import Path

from fleet_protocol.errors import BlobError
from fleet_protocol.foreign_files import open_regular, path_within, read_within
from shoal.store_folder import DATABASE, is_store

Rows = list[dict[str, str]]

# Patterns below the folder of all results. Runs are a few folders deeper than tables.
_TABLES = "*/*/*.csv"
_RUNS = f"seed-*/store/{DATABASE}"
_MOST_LEVELS = 8
"""Largest number of folders between a store and the folder of all results."""
_MOST_BYTES = 10_000_000
"""Size limit of a table; the longest so far has 50 kB."""
_HEADER = b"table,scale,arm,figure,"
NOTE = "note"
"""Key for the substitute of the paper's data; a table has no such column."""


def store_of(folder: Path) -> Path:
    """Return the store in a folder or, in a folder of results, the store of the newest run."""
    if is_store(folder) or not any(folder.glob(_TABLES)):
        return folder
    databases = list(folder.rglob(_RUNS))
    if not databases:
        return folder
    newest = max(databases, key=lambda path: path.stat().st_mtime)
    return newest.parent


def tables(store: Path) -> dict[str, Rows]:
    """Return the rows of the tables that the run of a store belongs to, by file.

    The result is empty if the store does not belong to `shoal reproduce`.
    """
    folder = _folder_of_results(store.resolve())
    if folder is None:
        return {}
    rows_by_file = {}
    for path in sorted(folder.glob(_TABLES)):
        # Skip tables that are being written, and other files.
        with suppress(OSError, ValueError, csv.Error, BlobError):
            rows = _read_table(folder, path)
            if rows is not None:
                rows_by_file[path.relative_to(folder).as_posix()] = rows
    return rows_by_file


def _folder_of_results(store: Path) -> Path | None:
    """Return the folder above a store that contains tables."""
    # Most stores belong to no table, and their parents need no search.
    if not store.match("seed-*/*"):
        return None
    for folder in store.parents[:_MOST_LEVELS]:
        if any(folder.glob(_TABLES)):
            return folder
    return None


def _read_table(folder: Path, path: Path) -> Rows | None:
    """Read a table; None for another file."""
    # Somebody may have packed the folder: a pipe would wait, and a link may lead anywhere.
    with open_regular(path_within(folder, path.relative_to(folder).as_posix())) as file:
        # The header tells tables from other files, before the rest is read.
        if not file.read(len(_HEADER)).startswith(_HEADER):
            return None
        file.seek(0)
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        return None
    text = io.StringIO(data.decode("utf-8"), newline="")
    rows = [_named_cells(row) for row in csv.DictReader(text)]
    note = _note(folder, path.with_suffix(".md"))
    if note:
        for row in rows:
            row[NOTE] = note
    return rows


def _note(folder: Path, page: Path) -> str:
    """Return the note in a table about substitute data; empty if there is none.

    The reports print it in bold, in a separate paragraph.
    """
    notes = []
    with suppress(BlobError, ValueError):
        data = read_within(folder, page.relative_to(folder).as_posix(), _MOST_BYTES)
        for line in data.decode("utf-8").splitlines():
            if line.startswith("**") and " stands for " in line:
                notes.append(line.strip("*"))
    return " ".join(notes)


def _named_cells(row: dict[str, str]) -> dict[str, str]:
    """Return the cells by column; cells without a column and missing cells are dropped."""
    return {name: cell for name, cell in row.items() if name and cell is not None}
