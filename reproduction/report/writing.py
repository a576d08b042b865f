"""Writes a table into a folder: figures, curves, Markdown and plots; what another statement gave is kept."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from fleet_protocol.blob_store import write_atomically
from reproduction.experiment import Arm, Experiment, Scale, stated
from reproduction.figures import stand_ins
from reproduction.report.markdown import as_markdown
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
from simulation.results.history import ACCURACY, Quantity
from simulation.results.plots import Curve, Widths, accuracy_over, over_rounds, save, widths_by_device

CURVES = ".curves.csv"
"""Ends the name of the file with a table's curves, from which its plots are made."""
_MOST_TOGETHER = 7  # curves, which are as many as there are colours; more are drawn apart, by what the methods share


def draw(experiment: Experiment, scale: Scale, points: Sequence[Point], folder: Path) -> None:
    """Write one plot for each quantity that the figures are taken from, and others where these are about more.

    Those are accuracy over time and bytes where a figure is of a time or at so many bytes, and the widths of the
    devices where they choose them, of the first seed of each arm.

    Raises:
        StorageError: a file cannot be written.
    """
    arms = [arm for arm in experiment.arms if any(point.arm == arm.name for point in points)]
    measures = [measure for arm in arms for measure in arm.measures]
    drawn, title = {}, experiment.title
    for published, here in stand_ins(experiment, {(arm.name, scale) for arm in arms}):
        title += f" ({here} stands for {published}, of which the published figures are)"
    for quantity in dict.fromkeys(measure.quantity for measure in measures if measure.quantity is not None):
        if curves := _curves(arms, points, quantity):
            drawn[quantity.name] = over_rounds(curves, quantity=quantity, title=title)
            for what in ("time", "bytes"):
                if quantity == ACCURACY and any(measure.over == what for measure in measures):
                    drawn[what] = accuracy_over(what, curves, title=title)
    if chosen := [widths for arm in arms if (widths := _widths(arm, scale, points))]:
        drawn["widths"] = widths_by_device(chosen, title=title)
    for name, figure in drawn.items():
        save(figure, folder / f"{experiment.table}-{name}.png")


def _runs(arm: Arm, points: Sequence[Point]) -> list[list[Point]]:
    """The curves of an arm, seed by seed."""
    mine = [point for point in points if point.arm == arm.name]
    return [[point for point in mine if point.seed == seed] for seed in sorted({point.seed for point in mine})]


def _curves(arms: Sequence[Arm], points: Sequence[Point], quantity: Quantity) -> list[Curve]:
    """The arms with figures that are taken from a quantity, as far as it was evaluated."""
    curves = []
    for arm in arms:
        histories = _runs(arm, points)
        asked = [measure for measure in arm.measures if measure.quantity == quantity and measure.target is None]
        if asked and all(any(quantity.value(row) is not None for row in rows) for rows in histories):
            figure = arm.published.get(asked[-1].name)
            share = 100.0 if quantity.share else 1.0
            targets = [m.target for m in arm.measures if m.quantity == quantity and m.target is not None]
            published = None if figure is None else figure.value / share
            curves.append(Curve(arm.name, histories, published, targets=targets))
    if len(curves) <= _MOST_TOGETHER:
        return curves
    apart = [replace(item, label=item.label.partition("/")[0], panel=item.label.partition("/")[2]) for item in curves]
    return sorted(apart, key=lambda curve: curve.panel)


def _widths(arm: Arm, scale: Scale, points: Sequence[Point]) -> Widths | None:
    """Those of an arm's first seed; None where the devices choose none."""
    rows = [point for point in _runs(arm, points)[0] if point.widths]
    if not rows:
        return None
    devices = [kind.type for kind in arm.config(scale, rows[0].seed).devices.kinds]
    return Widths(f"{arm.name}, seed {rows[0].seed}", devices, {point.round: point.by_device for point in rows})


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
