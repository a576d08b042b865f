"""The results of `shoal reproduce` in a folder: their tables, and the stores of their runs."""

import csv
from contextlib import suppress
from pathlib import Path

_TABLES, _RUNS = (
    "*/*/*.csv",
    "seed-*/store/shoal.db",
)  # below the folder of all results; runs lie a few folders deeper
_DEPTH = 8  # from a store up to that folder at most
_MOST_BYTES = 10_000_000  # of a file; the longest table so far has 50 kB


def store_of(folder: Path) -> Path:
    """The store that a folder is, or, where it holds results, that of the run that was written
    last.
    """
    if (folder / "shoal.db").exists() or not any(folder.glob(_TABLES)):
        return folder
    return max(
        folder.rglob(_RUNS),
        key=lambda path: path.stat().st_mtime,
        default=folder / "shoal.db",
    ).parent


def tables(store: Path) -> dict[str, list[dict[str, str]]]:
    """The rows of the tables among whose runs a store lies, by file.

    None where it is the store of anything else.
    """
    above = store.resolve().parents[: _DEPTH if store.resolve().match("seed-*/*") else 0]
    folder = next((each for each in above if any(each.glob(_TABLES))), store)
    found = {}
    for path in sorted(folder.glob(_TABLES)) if above else ():
        with (
            suppress(OSError, ValueError, csv.Error),
            path.open(encoding="utf-8", newline="") as file,
        ):
            if path.stat().st_size <= _MOST_BYTES and file.readline().startswith(
                "table,scale,arm,figure,"
            ):
                file.seek(0)
                rows = [
                    {k: v for k, v in row.items() if k and v is not None}
                    for row in csv.DictReader(file)
                ]
                found[path.relative_to(folder).as_posix()] = rows
    return found
