"""Writes a table into a folder: figures, curves, Markdown and plots; what another statement gave is kept."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from fleet_protocol.blob_store import write_atomically
from reproduction.experiment import Experiment, Scale, stated
from reproduction.report.markdown import as_markdown
from reproduction.report.plotting import draw
from reproduction.running import ArmResult
from reproduction.stored import (
    EARLIER,
    Point,
    Row,
    RowT,
    as_csv,
    points_of,
    read_points,
    read_rows,
    rows_of,
    statement_of,
)

CURVES = ".curves.csv"
"""Ends the name of the file with a table's curves, from which its plots are made."""


@dataclass(frozen=True)
class Written:
    """The files of a table (Markdown, figures, curves and plots), and the figures."""

    paths: tuple[Path, ...]
    rows: tuple[Row, ...]


def write_table(experiment: Experiment, scale: Scale, results: Sequence[ArmResult], folder: Path) -> Written:
    """Write the figures of complete runs, at least one; those of others stay, if the table stated the same then.

    Those that are older than any statement stay, too, and the table names them; where their curves were not kept, their
    page is set aside with its plots.

    Raises:
        StorageError: a file cannot be written.
    """
    before, curves = read_rows(folder / f"{experiment.table}.csv"), folder / f"{experiment.table}{CURVES}"
    then = statement_of(before)
    if before and (before[0].scale != scale or then not in {"", stated(experiment, scale)}):
        keep_earlier(folder, experiment.table, then or "nothing")
        before = ()
    elif before and not curves.exists():  # the plots of those could not be drawn again
        keep_earlier(folder, experiment.table, then or "nothing")
    new = {(row.arm, row.seed, row.figure): row for row in (*before, *rows_of(experiment, scale, results))}
    points = {(point.arm, point.seed, point.round): point for point in (*read_points(curves), *points_of(results))}
    write_atomically(curves, as_csv(_in_order(experiment, points.values()), Point).encode())
    return write_rows(experiment, tuple(new.values()), folder)


def write_rows(experiment: Experiment, rows: Sequence[Row], folder: Path) -> Written:
    """Write a table from its figures and curves alone, with the plots of older ones that lie there.

    Raises:
        StorageError: a file cannot be written.
    """
    ordered = _in_order(experiment, rows)
    curves = folder / f"{experiment.table}{CURVES}"
    points = read_points(curves)
    draw(experiment, rows[0].scale, points, folder)
    drawn = {(point.arm, point.seed) for point in points}
    plots = tuple(sorted(folder.glob(f"{experiment.table}-*.png")))
    markdown, table = folder / f"{experiment.table}.md", folder / f"{experiment.table}.csv"
    write_atomically(table, as_csv(ordered).encode())
    text = as_markdown(experiment, ordered, plots=[path.name for path in plots], drawn=drawn)
    write_atomically(markdown, text.encode())
    return Written((markdown, table, *([curves] if drawn else []), *plots), ordered)


def keep_earlier(folder: Path, table: str, digest: str) -> None:
    """Set a table's files aside, into a new folder named by the digest of what it stated when they were written."""
    names = (f"{EARLIER}{digest}" + (f"-{number}" if number else "") for number in count())
    earlier = next(path for name in names if not (path := folder / name).exists())
    earlier.mkdir()
    for path in [*folder.glob(f"{table}.*"), *folder.glob(f"{table}-*.png")]:
        path.replace(earlier / path.name)


def _in_order(experiment: Experiment, rows: Iterable[RowT]) -> tuple[RowT, ...]:
    """By arm and seed, and then as they came; those of arms that the table has no more are left out."""
    order = {arm.name: place for place, arm in enumerate(experiment.arms)}
    return tuple(sorted((row for row in rows if row.arm in order), key=lambda row: (order[row.arm], row.seed)))
