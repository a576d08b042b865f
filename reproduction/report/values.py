"""A table as comma-separated values and as values for JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from reproduction.experiment import Experiment, Scale
from reproduction.figures import compared, figures, mean_and_spread, reached
from reproduction.running import ArmResult

__all__ = ["as_csv", "plain"]

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


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
