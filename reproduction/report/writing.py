"""Writes a table into a folder: comma-separated values, Markdown and plots; what another statement gave is kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fleet_protocol.blob_store import write_atomically
from reproduction.experiment import Experiment, Scale
from reproduction.report.markdown import as_markdown
from reproduction.running import ArmResult
from reproduction.stored import Row, as_csv, read_rows, rows_of, stated
from simulation.results.history import Quantity
from simulation.results.plots import Curve, accuracy_over_time, over_rounds, save

EARLIER = "stated-"
"""Begins the name of a folder with what was written when the table's file stated something else."""


@dataclass(frozen=True)
class Written:
    """The files of a table (Markdown, CSV and plots), and the rows of the CSV."""

    paths: tuple[Path, ...]
    rows: tuple[Row, ...]


def write_table(experiment: Experiment, scale: Scale, results: Sequence[ArmResult], folder: Path) -> Written:
    """Write the figures of complete runs, at least one; those of others stay, if the table stated the same then.

    Raises:
        StorageError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = read_rows(folder / f"{experiment.table}.csv")
    if before and (before[0].stated, before[0].scale) != (stated(experiment, scale), scale):
        keep_earlier(folder, experiment.table, before[0].stated or "nothing")
        before = ()
    new = {(row.arm, row.seed, row.figure): row for row in (*before, *rows_of(experiment, scale, results))}
    _write_plots(experiment, results, folder)
    return write_rows(experiment, tuple(new.values()), folder)


def write_rows(experiment: Experiment, rows: Sequence[Row], folder: Path) -> Written:
    """Write a table from its figures alone, with the plots that lie there.

    Raises:
        StorageError: a file cannot be written.
    """
    order = [arm.name for arm in experiment.arms]
    ordered = tuple(sorted(rows, key=lambda row: (order.index(row.arm), row.seed)))
    plots = tuple(sorted(folder.glob(f"{experiment.table}-*.png")))
    markdown, table = folder / f"{experiment.table}.md", folder / f"{experiment.table}.csv"
    write_atomically(table, as_csv(ordered).encode())
    write_atomically(markdown, as_markdown(experiment, ordered, plots=[path.name for path in plots]).encode())
    return Written((markdown, table, *plots), ordered)


def keep_earlier(folder: Path, table: str, digest: str) -> None:
    """Set a table's files aside, into a folder named by the digest of what it stated when they were written."""
    earlier = folder / f"{EARLIER}{digest}"
    earlier.mkdir(exist_ok=True)
    for path in [*folder.glob(f"{table}.*"), *folder.glob(f"{table}-*.png")]:
        path.replace(earlier / path.name)


def _write_plots(experiment: Experiment, results: Sequence[ArmResult], folder: Path) -> None:
    """One plot for each quantity that the figures are taken from, and one over time where they are times."""
    measures = [measure for result in results for measure in result.arm.measures]
    for quantity in dict.fromkeys(measure.quantity for measure in measures if measure.quantity is not None):
        if curves := _curves(results, quantity):
            targets = [m.target for m in measures if m.quantity == quantity and m.target is not None]
            drawn = {quantity.name: over_rounds(curves, quantity=quantity, targets=targets, title=experiment.title)}
            if targets:
                drawn["time"] = accuracy_over_time(curves, targets=targets, title=experiment.title)
            for name, figure in drawn.items():
                save(figure, folder / f"{experiment.table}-{name}.png")


def _curves(results: Sequence[ArmResult], quantity: Quantity) -> list[Curve]:
    """The arms with figures that are taken from a quantity, as far as it was evaluated."""
    curves = []
    for arm in dict.fromkeys(result.arm for result in results):
        histories = [result.rows for result in results if result.arm is arm]
        asked = [measure for measure in arm.measures if measure.quantity == quantity and measure.target is None]
        if asked and all(any(quantity.value(row) is not None for row in rows) for rows in histories):
            figure = arm.published.get(asked[-1].name)
            share = 100.0 if quantity.share else 1.0
            curves.append(Curve(arm.name, histories, None if figure is None else figure.value / share))
    return curves
