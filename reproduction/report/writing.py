"""Writes a table into a folder: figures, curves, Markdown and plots.

What another statement gave is kept.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby
from pathlib import Path

from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import ConfigError
from reproduction.experiment import Arm, Experiment, Scale, stated
from reproduction.figures import VERDICTS, judged, stand_ins
from reproduction.report.cells import claim_cells, table_text
from reproduction.report.markdown import as_markdown, stated_since
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
from simulation.results.figures import save
from simulation.results.history import ACCURACY, Quantity
from simulation.results.plots import Curve, accuracy_over, over_rounds
from simulation.results.tier_plots import Widths, widths_by_device

CURVES = ".curves.csv"
"""Ends the name of the file with a table's curves, from which its plots are made."""
# curves, which are as many as there are colours; more are drawn apart, by what the methods share
_MOST_TOGETHER = 7
_ABOUT = """# What we ran

Every claim of the papers' tables, as `shoal reproduce --report` wrote this page from the figures stored beside it. What
is claimed, what decides and how it is tested stands in the table's file (`reproduction/tables`) before it is run: the
mean of the last evaluations (of arms with a run that is too old to have it the last one), or a simulated time; paired
over the seeds; Student's interval of 95 %.

- `holds`: all of the interval is beyond what is wanted; `does not hold`: all of it is on the other side.
- `undecided`: neither, or not all of the stated seeds, or a target that one of the two never reached, or other data.
  `> 2.65` is what is known of a ratio of times then: the first had not reached it when its run ended.
- `not run`: nothing is stored of one of the two, or they share no stated seed; other seeds stand in the table alone.

How to run a table is in [simulation](../simulation.md)."""


def write_index(folder: Path, tables: Mapping[str, Experiment]) -> Path:
    """Write every table's Markdown again, in the folder of its name, and ``README.md`` from all of
    them.

    What was written when a table stated something else is set aside as it is, and not judged by
    what is stated now.

    Raises:
        DataError: a stored table is damaged.
        StorageError: a file cannot be written.
    """
    found = {name: read_rows(folder / name / f"{name}.csv") for name in tables}
    for name, rows in found.items():
        then = statement_of(rows)
        if then and then != stated(tables[name], rows[0].scale):
            keep_earlier(folder / name, name, then)
            found[name] = ()
        elif rows:
            write_rows(tables[name], rows, folder / name)
    parts = [
        _ABOUT,
        table_text([_counts(paper, group, found) for paper, group in _by_paper(tables)]),
    ]
    for paper, group in _by_paper(tables):
        parts.append(f"## {paper}")
        for experiment in group:
            parts += _table(experiment, found[experiment.table], folder / experiment.table)
    path = folder / "README.md"
    write_atomically(path, ("\n\n".join(parts) + "\n").encode())
    return path


def _by_paper(
    tables: Mapping[str, Experiment],
) -> Iterator[tuple[str, list[Experiment]]]:
    for paper, group in groupby(tables.values(), key=lambda table: table.title.partition(",")[0]):
        yield paper, list(group)


def _counts(
    paper: str, group: Sequence[Experiment], found: Mapping[str, Sequence[Row]]
) -> dict[str, str]:
    verdicts = Counter(
        item.verdict for table in group for item in judged(table, found[table.table])
    )
    return {"claims of": paper, **{word: str(verdicts[word]) for word in VERDICTS}}


def _table(experiment: Experiment, rows: Sequence[Row], folder: Path) -> Iterator[str]:
    name = experiment.table
    title = experiment.title.partition(", ")[2]
    yield f"### {title[0].upper()}{title[1:]}"
    earlier = [
        f"[{path.name}]({name}/{path.name}/{name}.md)"
        for path in sorted(folder.glob(f"{EARLIER}*"))
    ]
    words = [f"`{name}`: not run."]
    if rows:
        runs = {(row.arm, row.seed) for row in rows}
        arms = f"{len({arm for arm, _ in runs})} of {len(experiment.arms)} arms"
        words = [f"[{name}]({name}/{name}.md): scale {rows[0].scale}, {arms}, {len(runs)} runs."]
        words += [since] if (since := stated_since(rows)) else []
    yield " ".join(
        [
            *words,
            *(
                [f"Earlier, when something else was stated: {', '.join(earlier)}."]
                if earlier
                else []
            ),
        ]
    )
    items = [claim_cells(item) for item in judged(experiment, rows) if item.claim.says]
    yield (
        table_text(items)
        if items
        else "Nothing is claimed of it; its figures stand beside the others."
    )
    yield from experiment.checked if rows and rows[0].scale == "small" else ()


def draw(experiment: Experiment, scale: Scale, points: Sequence[Point], folder: Path) -> None:
    """Write one plot for each quantity that the figures are taken from, and others where these are
    about more.

    Those are accuracy over time and bytes where a figure is of a time or at so many bytes, and the
    widths of the devices where they choose them, of the first seed of each arm.

    Raises:
        StorageError: a file cannot be written.
    """
    arms = [arm for arm in experiment.arms if any(point.arm == arm.name for point in points)]
    measures = [measure for arm in arms for measure in arm.measures]
    drawn = {}
    title = experiment.title
    for published, here in stand_ins(experiment, {(arm.name, scale) for arm in arms}):
        title += f" ({here} stands for {published}, of which the published figures are)"
    for quantity in dict.fromkeys(
        measure.quantity for measure in measures if measure.quantity is not None
    ):
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
    return [
        [point for point in mine if point.seed == seed]
        for seed in sorted({point.seed for point in mine})
    ]


def _curves(arms: Sequence[Arm], points: Sequence[Point], quantity: Quantity) -> list[Curve]:
    """The arms with figures that are taken from a quantity, as far as it was evaluated."""
    curves = []
    for arm in arms:
        histories = _runs(arm, points)
        asked = [
            measure
            for measure in arm.measures
            if measure.quantity == quantity and measure.target is None
        ]
        if asked and all(
            any(quantity.value(row) is not None for row in rows) for rows in histories
        ):
            figure = arm.published.get(asked[-1].name)
            share = 100.0 if quantity.share else 1.0
            targets = [
                m.target for m in arm.measures if m.quantity == quantity and m.target is not None
            ]
            published = None if figure is None else figure.value / share
            curves.append(Curve(arm.name, histories, published, targets=targets))
    if len(curves) <= _MOST_TOGETHER:
        return curves
    apart = [
        replace(item, label=item.label.partition("/")[0], panel=item.label.partition("/")[2])
        for item in curves
    ]
    return sorted(apart, key=lambda curve: curve.panel)


def _widths(arm: Arm, scale: Scale, points: Sequence[Point]) -> Widths | None:
    """Those of an arm's first seed; None where the devices choose none."""
    rows = [point for point in _runs(arm, points)[0] if point.widths]
    if not rows:
        return None
    devices = [kind.type for kind in arm.config(scale, rows[0].seed).devices.kinds]
    return Widths(
        f"{arm.name}, seed {rows[0].seed}",
        devices,
        {point.round: point.by_device for point in rows},
    )


@dataclass(frozen=True)
class Written:
    """The files of a table (Markdown, figures, curves and plots), and the figures."""

    paths: tuple[Path, ...]
    rows: tuple[Row, ...]


def write_table(
    experiment: Experiment, scale: Scale, results: Sequence[ArmResult], folder: Path
) -> Written:
    """Write the figures of complete runs, at least one.

    Those of others stay, if the table stated the same then.

    Those that are older than any statement stay, too, and the table names them; where their curves
    were not kept, their page is set aside with its plots.

    Raises:
        ConfigError: what is there is of another scale.
        StorageError: a file cannot be written.
    """
    before = read_rows(folder / f"{experiment.table}.csv")
    curves = folder / f"{experiment.table}{CURVES}"
    then = statement_of(before)
    if before and before[0].scale != scale:
        raise ConfigError(
            f"{folder} has this table at scale {before[0].scale}; name another folder for {scale}"
        )
    if before and then not in {"", stated(experiment, scale)}:
        keep_earlier(folder, experiment.table, then or "nothing")
        before = ()
    elif before and not curves.exists():  # the plots of those could not be drawn again
        keep_earlier(folder, experiment.table, then or "nothing")
    new = {
        (row.arm, row.seed, row.figure): row
        for row in (*before, *rows_of(experiment, scale, results))
    }
    points = {
        (point.arm, point.seed, point.round): point
        for point in (*read_points(curves), *points_of(results))
    }
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
    markdown = folder / f"{experiment.table}.md"
    table = folder / f"{experiment.table}.csv"
    write_atomically(table, as_csv(ordered).encode())
    text = as_markdown(experiment, ordered, plots=[path.name for path in plots], drawn=drawn)
    write_atomically(markdown, text.encode())
    return Written((markdown, table, *([curves] if drawn else []), *plots), ordered)


def keep_earlier(folder: Path, table: str, digest: str) -> None:
    """Set a table's files aside, into a new folder named by the digest of what it stated when they
    were written.
    """
    names = (f"{EARLIER}{digest}" + (f"-{number}" if number else "") for number in count())
    earlier = next(path for name in names if not (path := folder / name).exists())
    earlier.mkdir()
    for path in [*folder.glob(f"{table}.*"), *folder.glob(f"{table}-*.png")]:
        path.replace(earlier / path.name)


def _in_order(experiment: Experiment, rows: Iterable[RowT]) -> tuple[RowT, ...]:
    """By arm and seed, and then as they came.

    Those of arms that the table has no more are left out.
    """
    order = {arm.name: place for place, arm in enumerate(experiment.arms)}
    return tuple(
        sorted(
            (row for row in rows if row.arm in order),
            key=lambda row: (order[row.arm], row.seed),
        )
    )
