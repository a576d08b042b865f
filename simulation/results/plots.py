"""Plots of simulations: a quantity over rounds, and over emulated time or bytes."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from matplotlib.figure import Figure

from simulation.results.curves import Curve, Values, by_round, by_spent
from simulation.results.figures import save, tick_rounds
from simulation.results.panels import plot_panels
from simulation.results.quantities import ACCURACY, Judged, Quantity, shown_quantities
from simulation.results.rounds import RoundRow
from simulation.results.tier_plots import tier_counts

_UNITS = ((7200.0, 3600.0, "hours"), (300.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""From this many seconds on, an axis uses a unit of this many seconds, with its name."""

_Axis: TypeAlias = Literal["time", "bytes"]


def over_rounds(
    curves: Sequence[Curve], *, quantity: Quantity = ACCURACY, title: str = ""
) -> Figure:
    """Plot a quantity after each round in which it was evaluated.

    Raises:
        DataError: no curve has an evaluated round.
    """
    figure = plot_panels(curves, lambda curve: by_round(curve, quantity), quantity, title)
    for axes in figure.axes:
        axes.set_xlabel("round")
        tick_rounds(axes)
    return figure


def over_spent(
    spent_on: _Axis,
    curves: Sequence[Curve],
    *,
    quantity: Quantity = ACCURACY,
    title: str = "",
) -> Figure:
    """Plot a quantity over emulated time, or over megabytes of weights and updates.

    Seeds reach a round at different times, so their values are interpolated between rounds, and
    shown as far as every seed goes.

    Raises:
        DataError: no curve has an evaluated round.
    """
    spent: Callable[[Sequence[Judged]], Values]
    if spent_on == "bytes":
        label = "MB of payload"
        spent = _megabytes
    else:
        scale, unit = _time_unit(curves)
        label = f"simulated time, {unit}"
        spent = partial(_times, scale=scale)
    figure = plot_panels(curves, lambda curve: by_spent(curve, spent, quantity), quantity, title)
    for axes in figure.axes:
        axes.set_xlabel(label)
        axes.set_xlim(left=0)
    return figure


def plot_run(folder: Path, rows: Sequence[RoundRow], *, title: str = "") -> tuple[Path, ...]:
    """Write the plots of one run next to its history.

    Returns:
        ``tiers.png``; if a round was evaluated ``accuracy.png`` and ``accuracy_time.png``, or the
        same of ``loss`` where there is no accuracy; and a file for each metric.

    Raises:
        DataError: there is no round.
        StorageError: the folder cannot be written.
    """
    figures = {"tiers.png": tier_counts(rows, title=title)}
    quantities = shown_quantities(rows)
    for quantity in quantities:
        curve = Curve(quantity.name, (rows,))
        figures[f"{quantity.name}.png"] = over_rounds((curve,), quantity=quantity, title=title)
    # Only the first quantity has a plot over time: accuracy, or loss.
    for score in quantities[:1]:
        curve = Curve(score.name, (rows,))
        over_time = over_spent("time", (curve,), quantity=score, title=title)
        figures[f"{score.name}_time.png"] = over_time
    paths = []
    for name in sorted(figures):
        paths.append(save(figures[name], folder / name))
    return tuple(paths)


def _megabytes(rows: Sequence[Judged]) -> Values:
    """Return the megabytes exchanged up to each round."""
    # 10^6 bytes.
    return np.cumsum([row.payload_bytes / 1e6 for row in rows])


def _times(rows: Sequence[Judged], scale: float) -> Values:
    """Return the emulated time at the end of each round, in a unit of this many seconds."""
    return np.array([row.simulated_total / scale for row in rows])


def _time_unit(curves: Sequence[Curve]) -> tuple[float, str]:
    """Return the unit for the longest run, in seconds, and its name."""
    longest = 0.0
    for curve in curves:
        for rows in curve.histories:
            if rows:
                longest = max(longest, rows[-1].simulated_total)
    for least, scale, unit in _UNITS:
        if longest >= least:
            return scale, unit
    raise AssertionError("the last unit begins at 0")
