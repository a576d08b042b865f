"""Writes a table as Markdown, CSV and plots: the published figure, ours with every seed, and what differs."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet_protocol.blob_store import write_atomically
from simulation.plots import Curve, accuracy_over_time, over_rounds, save
from simulation.quantity import ACCURACY, Quantity
from simulation.reproduce.differences import Difference, differences, grouped
from simulation.reproduce.experiment import Arm, Experiment, Scale
from simulation.reproduce.figures import Compared, Figure, Reached, compared, figures, mean_and_spread, reached
from simulation.reproduce.measures import Measure
from simulation.reproduce.published import Published
from simulation.reproduce.running import ArmResult

__all__ = ["Written", "as_csv", "as_markdown", "figure_cells", "plain", "write_table"]

_MISSING = "-"
_NOT_REACHED = "not reached"
_CSV_COLUMNS = (
    "table",
    "scale",
    "arm",
    "figure",
    "unit",
    "published",
    "published_spread",
    "seed",
    "best",
    "best_round",
    "last",
    "rounds",
    "simulated_seconds",
    "seconds",
)


@dataclass(frozen=True)
class Written:
    """The files of a table.

    Attributes:
        markdown: for people.
        csv: one line for each figure and seed.
        plots: PNG.
    """

    markdown: Path
    csv: Path
    plots: tuple[Path, ...]

    @property
    def paths(self) -> tuple[Path, ...]:
        """All of them."""
        return (self.markdown, self.csv, *self.plots)


def write_table(experiment: Experiment, scale: Scale, results: Sequence[ArmResult], folder: Path) -> Written:
    """Write everything.

    Args:
        experiment: the table.
        scale: at which scale it was run.
        results: the complete runs, at least one.
        folder: where to; it is made.

    Raises:
        StorageError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    markdown, table = folder / f"{experiment.table}.md", folder / f"{experiment.table}.csv"
    write_atomically(table, as_csv(experiment, scale, results).encode())
    plots = _write_plots(experiment, results, folder)
    text = as_markdown(experiment, scale, results, plots=[path.name for path in plots])
    write_atomically(markdown, text.encode())
    return Written(markdown, table, plots)


def as_csv(experiment: Experiment, scale: Scale, results: Sequence[ArmResult]) -> str:
    """The figures as comma-separated values, one line for each figure and seed.

    Args:
        experiment: the table.
        scale: at which scale it was run.
        results: the complete runs.
    """
    runs = {(result.arm.name, result.seed): result for result in results}
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(_CSV_COLUMNS)
    for figure in figures(results):
        published = figure.published
        for seed, reading in figure.readings.items():
            run = runs[figure.arm.name, seed]
            writer.writerow(
                (
                    experiment.table,
                    scale,
                    figure.arm.name,
                    figure.measure.name,
                    figure.measure.unit,
                    None if published is None else published.value,
                    None if published is None else published.spread,
                    seed,
                    _rounded(reading.best),
                    reading.best_round,
                    _rounded(reading.last),
                    len(run.rows),
                    _rounded(run.rows[-1].simulated_total),
                    _rounded(run.seconds),
                )
            )
    return buffer.getvalue()


def as_markdown(
    experiment: Experiment, scale: Scale, results: Sequence[ArmResult], *, plots: Sequence[str] = ()
) -> str:
    """The table with everything that belongs to it.

    Args:
        experiment: the table.
        scale: at which scale it was run.
        results: the complete runs; what was not run is not in the table.
        plots: names of plots that lie beside it.
    """
    found = figures(results)
    arms = tuple(dict.fromkeys(result.arm for result in results))
    parts = [
        f"# {experiment.title}",
        f"Paper: <{experiment.paper}>. Scale: {scale}. {len(arms)} of {len(experiment.arms)} arms run"
        + (
            f"; the others are not in this table. {_remaining(experiment, arms)}"
            if len(arms) < len(experiment.arms)
            else "."
        ),
        *_data_warning(results),
        _figure_table(found),
        *(f"![{name}]({name})" for name in plots),
        *_comparison_section(compared(experiment, found)),
        *_milestone_section(reached(experiment, scale, results)),
        *_difference_section(scale, results),
        *_note_section(experiment),
        *_run_section(experiment, scale, results),
    ]
    return "\n\n".join(parts) + "\n"


def _remaining(experiment: Experiment, arms: Sequence[Arm]) -> str:
    left = [arm.name for arm in experiment.arms if arm not in arms]
    return f"Not run: {', '.join(left)}."


def _data_warning(results: Sequence[ArmResult]) -> Iterable[str]:
    """Whether any arm has other data than the paper's, which no published figure is about."""
    other = {
        (published, result.config.data.name)
        for result in results
        if (published := result.arm.config("paper", result.seed).data.name) != result.config.data.name
    }
    for published, here in sorted(other):
        yield f"**{here} stands for {published}: the published figures do not compare with ours.**"


def figure_cells(figure: Figure) -> dict[str, str]:
    """A figure as cells by column."""
    best, last = list(figure.best.values()), list(figure.last.values())
    return {
        "arm": figure.arm.name,
        "what it is": figure.arm.about,
        "figure": _named(figure.measure),
        "published": _published(figure.published, figure.measure),
        "ours, best round": _mean(best, figure.measure),
        "by seed": ", ".join(f"{seed}: {_value(value, figure.measure)}" for seed, value in figure.best.items()),
        "ours, last round": _MISSING if None in last else _mean(last, figure.measure),
    }


def plain(experiment: Experiment, scale: Scale, results: Sequence[ArmResult]) -> dict[str, Any]:
    """The table as values for JSON.

    Args:
        experiment: the table.
        scale: at which scale it was run.
        results: the complete runs.
    """
    found = figures(results)
    return {
        "table": experiment.table,
        "scale": scale,
        "arms_run": len({result.arm.name for result in results}),
        "arms": len(experiment.arms),
        "figures": [
            {
                "arm": figure.arm.name,
                "figure": figure.measure.name,
                "unit": figure.measure.unit,
                "published": None if figure.published is None else figure.published.value,
                "mean": mean_and_spread(list(figure.best.values()))[0],
                "spread": mean_and_spread(list(figure.best.values()))[1],
                "best": figure.best,
                "last": figure.last,
            }
            for figure in found
        ],
        "comparisons": [
            {
                "left": item.comparison.left,
                "right": item.comparison.right,
                "how": item.comparison.how,
                "figure": item.measure.name,
                "published": item.published,
                "mean": item.mean,
                "by_seed": dict(item.by_seed),
                "holds": item.holds,
            }
            for item in compared(experiment, found)
        ],
        "milestones": [
            {
                "arm": item.milestone.arm,
                "by_round": item.milestone.by_round,
                "at_least": item.milestone.at_least,
                "by_seed": dict(item.by_seed),
                "holds": item.holds,
            }
            for item in reached(experiment, scale, results)
        ],
    }


def _figure_table(found: Sequence[Figure]) -> str:
    rows = [figure_cells(figure) for figure in found]
    return _table(tuple(rows[0]), [tuple(row.values()) for row in rows])


def _comparison_section(items: Sequence[Compared]) -> Iterable[str]:
    if not items:
        return
    yield "## Compared, seed by seed"
    rows = []
    for item in items:
        comparison = item.comparison
        ratio = comparison.how == "over"
        sign = "/" if ratio else "-"
        rows.append(
            (
                f"{comparison.left} {sign} {comparison.right}",
                _named(item.measure),
                _MISSING if item.published is None else _signed(item.published, ratio=ratio),
                _mean_signed(list(item.by_seed.values()), ratio=ratio),
                ", ".join(f"{seed}: {_signed(value, ratio=ratio)}" for seed, value in item.by_seed.items()),
                _bound(comparison.at_least, comparison.at_most),
                {None: _MISSING, True: "yes", False: "no"}[item.holds],
            )
        )
    yield _table(("arms", "figure", "published", "ours, mean", "by seed", "wanted", "holds"), rows)


def _milestone_section(items: Sequence[Reached]) -> Iterable[str]:
    if not items:
        return
    yield "## Reached by round"
    rows = [
        (
            item.milestone.arm,
            str(item.milestone.by_round),
            f"{item.milestone.at_least:g} %",
            ", ".join(f"{seed}: {_MISSING if v is None else f'{v:.2f} %'}" for seed, v in item.by_seed.items()),
            "yes" if item.holds else "no",
        )
        for item in items
    ]
    yield _table(("arm", "round", "wanted", "best until then, by seed", "holds"), rows)


def _difference_section(scale: Scale, results: Sequence[ArmResult]) -> Iterable[str]:
    yield "## What differs from the published protocol"
    by_arm: dict[str, Sequence[Difference]] = {
        result.arm.name: differences(result.arm.config("paper", result.seed), result.config) for result in results
    }
    found = grouped(by_arm)
    if not found:
        yield f"Computed from the configurations: nothing. Scale {scale} is the published protocol."
        return
    yield "Computed from the configurations."
    rows = [
        (f"`{item.key}`", item.published, item.here, ", ".join(item.arms) if item.arms else "all") for item in found
    ]
    yield _table(("setting", "published", "here", "arms"), rows)


def _note_section(experiment: Experiment) -> Iterable[str]:
    if experiment.notes:
        yield "What no setting shows, at every scale:"
        yield "\n".join(f"- {note}" for note in experiment.notes)


def _run_section(experiment: Experiment, scale: Scale, results: Sequence[ArmResult]) -> Iterable[str]:
    yield "## Runs"
    arms = dict.fromkeys(result.arm.name for result in results)
    seeds = sorted({result.seed for result in results})
    default = {arm.name for arm in experiment.chosen(scale)}
    only = "" if set(arms) == default else f" --only {','.join(arms)}"
    yield f"    shoal reproduce {experiment.table} --scale {scale} --seeds {','.join(map(str, seeds))}{only}"
    timed = _timed(results)
    rows = [
        (
            result.arm.name,
            str(result.seed),
            str(len(result.rows)),
            _duration(result.seconds),
            *([_duration(result.rows[-1].simulated_total)] if timed else []),
            f"{result.config.engine.kind}, {result.config.engine.backend}",
        )
        for result in results
    ]
    yield _table(("arm", "seed", "rounds", "real time", *(["simulated time"] if timed else []), "engine"), rows)
    yield f"Real time of all rounds together: {_duration(sum(result.seconds for result in results))}."
    yield "\n".join(
        f"- {line}"
        for line in dict.fromkeys(
            f"{result.machine}; " + ", ".join(f"{name} {number}" for name, number in result.versions.items())
            for result in results
        )
    )


def _write_plots(experiment: Experiment, results: Sequence[ArmResult], folder: Path) -> tuple[Path, ...]:
    """One plot for each quantity that the figures are taken from, and one over time where they are times."""
    measures = [measure for result in results for measure in result.arm.measures]
    plots = []
    for quantity in dict.fromkeys(measure.quantity for measure in measures if measure.quantity is not None):
        if curves := _curves(results, quantity):
            figure = over_rounds(curves, quantity=quantity, title=experiment.title)
            plots.append(save(figure, folder / f"{experiment.table}-{quantity.name}.png"))
            if quantity == ACCURACY and _timed(results):
                figure = accuracy_over_time(curves, title=experiment.title)
                plots.append(save(figure, folder / f"{experiment.table}-time.png"))
    return tuple(plots)


def _curves(results: Sequence[ArmResult], quantity: Quantity) -> list[Curve]:
    """The arms with figures that are taken from a quantity, as far as it was evaluated."""
    curves = []
    for arm in dict.fromkeys(result.arm for result in results):
        histories = [result.rows for result in results if result.arm is arm]
        asked = any(measure.quantity == quantity for measure in arm.measures)
        if asked and all(any(quantity.value(row) is not None for row in rows) for rows in histories):
            curves.append(Curve(arm.name, histories))
    return curves


def _timed(results: Sequence[ArmResult]) -> bool:
    """Whether the table is about simulated time."""
    return any(measure.unit == "h" for result in results for measure in result.arm.measures)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _named(measure: Measure) -> str:
    return f"{measure.title}, {measure.unit}" if measure.unit else measure.title


def _digits(measure: Measure) -> int:
    return {"h": 3, "%": 2}.get(measure.unit, 0 if measure.name == "rounds" else 2)


def _value(value: float | None, measure: Measure) -> str:
    return _NOT_REACHED if value is None else f"{value:.{_digits(measure)}f}"


def _published(figure: Published | None, measure: Measure) -> str:
    if figure is None:
        return _MISSING
    spread = "" if figure.spread is None else f" ± {figure.spread:.2f}"
    return f"{figure.value:.{min(_digits(measure), 2)}f}{spread}"


def _mean(values: Sequence[float | None], measure: Measure) -> str:
    mean, spread = mean_and_spread(values)
    if mean is None:
        return _NOT_REACHED
    return _value(mean, measure) + ("" if spread is None else f" ± {spread:.{max(_digits(measure), 1)}f}")


def _signed(value: float | None, *, ratio: bool) -> str:
    if value is None:
        return _MISSING
    return f"{value:.2f}" if ratio else f"{value:+.2f}"


def _mean_signed(values: Sequence[float | None], *, ratio: bool) -> str:
    mean, spread = mean_and_spread(values)
    return _signed(mean, ratio=ratio) + ("" if spread is None else f" ± {spread:.2f}")


def _bound(at_least: float | None, at_most: float | None) -> str:
    words = ([f">= {at_least:g}"] if at_least is not None else []) + (
        [f"<= {at_most:g}"] if at_most is not None else []
    )
    return " and ".join(words) or _MISSING


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.2f} h"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
