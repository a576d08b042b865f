"""Writes a table into a folder: Markdown, comma-separated values and plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fleet_protocol.blob_store import write_atomically
from reproduction.experiment import Experiment, Scale
from reproduction.figures import timed
from reproduction.report.markdown import as_markdown
from reproduction.report.values import as_csv
from reproduction.running import ArmResult
from simulation.results.plots import Curve, accuracy_over_time, over_rounds, save
from simulation.results.quantity import ACCURACY, Quantity

__all__ = ["Written", "write_table"]


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


def _write_plots(experiment: Experiment, results: Sequence[ArmResult], folder: Path) -> tuple[Path, ...]:
    """One plot for each quantity that the figures are taken from, and one over time where they are times."""
    measures = [measure for result in results for measure in result.arm.measures]
    plots = []
    for quantity in dict.fromkeys(measure.quantity for measure in measures if measure.quantity is not None):
        if curves := _curves(results, quantity):
            figure = over_rounds(curves, quantity=quantity, title=experiment.title)
            plots.append(save(figure, folder / f"{experiment.table}-{quantity.name}.png"))
            if quantity == ACCURACY and timed(results):
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
