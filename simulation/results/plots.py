"""Plots of simulations: a quantity over rounds, and over emulated time or bytes.

A curve is a method or a setting with one history per seed. Its line is their mean; its band ranges
from the lowest to the highest.
"""

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from fleet_protocol.errors import DataError
from simulation.results.figures import (
    COLOURS,
    LINES,
    STEPS,
    add_legend,
    new_figure,
    save,
    tick_rounds,
)
from simulation.results.history import (
    ACCURACY,
    Judged,
    Quantity,
    RoundRow,
    shown_quantities,
)
from simulation.results.tier_plots import tier_counts

_GRID_POINTS = 400
_LABEL_LETTERS = 24  # characters in a line of an axis label
_UNITS = ((7200.0, 3600.0, "hours"), (300.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""From this many seconds on, an axis uses a unit of this many seconds, with its name."""

_Axis: TypeAlias = Literal["time", "bytes"]
_Values: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """One line of a plot; consecutive curves with the same panel share it.

    Attributes:
        label: label in the legend.
        histories: the rounds of each seed, in order; at least one seed.
        published: the paper's value, marked at the right edge.
        panel: title of the panel.
        targets: target values, each drawn as a line in its panel.
    """

    label: str
    histories: Sequence[Sequence[Judged]]
    published: float | None = None
    panel: str = ""
    targets: Sequence[float] = ()


@dataclass(frozen=True)
class _Band:
    """Values of all seeds at the same places."""

    places: _Values  # [places]
    values: _Values  # [seeds, places]


_BandOf: TypeAlias = Callable[[Curve], _Band]


def over_rounds(
    curves: Sequence[Curve], *, quantity: Quantity = ACCURACY, title: str = ""
) -> Figure:
    """Plot a quantity after each round in which it was evaluated.

    Raises:
        DataError: no curve has an evaluated round.
    """
    figure = _plot_panels(curves, lambda curve: _by_round(curve, quantity), quantity, title)
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
    spent: Callable[[Sequence[Judged]], _Values]
    if spent_on == "bytes":
        label = "MB of payload"
        spent = _megabytes
    else:
        scale, unit = _time_unit(curves)
        label = f"simulated time, {unit}"
        spent = partial(_times, scale=scale)
    figure = _plot_panels(curves, lambda curve: _by_spent(curve, spent, quantity), quantity, title)
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


# Places on the horizontal axis.


def _megabytes(rows: Sequence[Judged]) -> _Values:
    """Return the megabytes exchanged up to each round."""
    # 10^6 bytes.
    return np.cumsum([row.payload_bytes / 1e6 for row in rows])


def _times(rows: Sequence[Judged], scale: float) -> _Values:
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


def _by_round(curve: Curve, quantity: Quantity) -> _Band:
    """Return the values at the rounds that every seed evaluated."""
    seeds: list[dict[int, float]] = []
    for rows in curve.histories:
        evaluated: dict[int, float] = {}
        for row in rows:
            value = quantity.value(row)
            if value is not None:
                evaluated[row.round] = value
        seeds.append(evaluated)
    common: list[int] = []
    if seeds:
        # A mean over other seeds at each round would jump.
        rounds_of_seeds = map(set, seeds)
        common = sorted(set.intersection(*rounds_of_seeds))
    values: list[list[float]] = []
    for evaluated in seeds:
        values.append([evaluated[number] for number in common])
    places = np.array(common, dtype=np.float64)
    return _Band(places, np.array(values, dtype=np.float64))


def _by_spent(
    curve: Curve, spent: Callable[[Sequence[Judged]], _Values], quantity: Quantity
) -> _Band:
    """Return the values of all seeds on one grid.

    It starts at the latest first value of a seed and ends with the shortest seed.
    """
    seeds: list[_Values] = []
    for rows in curve.histories:
        seeds.append(_points(rows, spent(rows), quantity))
    nothing = _Band(np.empty(0), np.empty((len(seeds), 0)))
    if not seeds or min(map(len, seeds)) == 0:
        return nothing
    grid = _common_grid(seeds)
    if not grid.size:
        return nothing
    values: list[_Values] = []
    for points in seeds:
        places = points[:, 0]
        values.append(np.interp(grid, places, points[:, 1]))
    return _Band(grid, np.array(values))


def _common_grid(seeds: Sequence[_Values]) -> _Values:
    """Return places that all seeds reach; empty if one ends before another begins.

    Args:
        seeds: places and values of each, ``[rounds, 2]``.
    """
    if len(seeds) == 1:
        return seeds[0][:, 0]  # a single seed keeps its own points
    first = -math.inf
    last = math.inf
    for points in seeds:
        first = max(first, points[0, 0])
        last = min(last, points[-1, 0])
    if first > last:
        return np.empty(0)
    # A grid of one place if two ends meet.
    return np.unique(np.linspace(first, last, _GRID_POINTS))


def _points(rows: Sequence[Judged], places: _Values, quantity: Quantity) -> _Values:
    """Return the places and values of the evaluated rounds, ``[rounds, 2]``."""
    points: list[tuple[float, float]] = []
    for place, row in zip(places, rows, strict=True):
        value = quantity.value(row)
        if value is not None:
            points.append((place, value))
    return np.array(points)


# Drawing.


def _plot_panels(
    curves: Sequence[Curve],
    band_of: _BandOf,
    quantity: Quantity,
    title: str,
) -> Figure:
    """Draw consecutive curves with the same panel into the same axes."""
    names: list[str] = []
    panels: list[list[Curve]] = []
    # Curves are in the order of their panels.
    for name, group in groupby(curves, lambda curve: curve.panel):
        names.append(name)
        panels.append(list(group))
    if not curves:
        # Drawing refuses an empty panel.
        names = [""]
        panels = [[]]
    figure, all_axes = new_figure(title, len(panels))
    for axes, name, panel in zip(all_axes, names, panels, strict=True):
        _draw_curves(axes, panel, band_of, quantity)
        _draw_targets(axes, panel, quantity)
        axes.set_title(name, loc="left", fontsize=9)
        _label_panel(axes, panel, quantity)
    return figure


def _draw_curves(
    axes: Axes,
    curves: Sequence[Curve],
    band_of: _BandOf,
    quantity: Quantity,
) -> None:
    drawn = 0
    for number, curve in enumerate(curves):
        band = band_of(curve)
        if band.places.size:
            drawn += 1
            _draw_curve(axes, curve, band, number, quantity)
    if not drawn:
        raise DataError(
            f"no round was evaluated, so there is no {quantity.name} to plot; add a test set to"
            " the simulation"
        )


def _draw_curve(
    axes: Axes,
    curve: Curve,
    band: _Band,
    number: int,
    quantity: Quantity,
) -> None:
    """Draw the line, the published value and the band of a curve."""
    colour = COLOURS[number % len(COLOURS)]
    line = LINES[number % len(LINES)]
    # A line through a single point would be invisible.
    marker = "o" if band.places.size == 1 else None
    seeds = len(band.values)
    label = f"{curve.label} ({seeds} seeds)" if seeds > 1 else curve.label
    if curve.published is not None:
        label = f"{label}, published {_value_text(curve.published, quantity)}"
    axes.plot(
        band.places,
        band.values.mean(axis=0),
        color=colour,
        linestyle=line,
        linewidth=1.8,
        marker=marker,
        label=label,
    )
    if curve.published is not None:
        # At the edge of the axes, whatever their scale.
        at_edge = axes.get_yaxis_transform()
        (mark,) = axes.plot(1.0, curve.published, "<", color=colour, transform=at_edge)
        mark.set_clip_on(False)
    if seeds > 1:
        low = band.values.min(axis=0)
        high = band.values.max(axis=0)
        axes.fill_between(band.places, low, high, color=colour, alpha=0.18, linewidth=0)


def _draw_targets(axes: Axes, curves: Sequence[Curve], quantity: Quantity) -> None:
    targets: set[float] = set()
    for curve in curves:
        targets.update(curve.targets)
    # A target of several curves is drawn once.
    for target in sorted(targets):
        axes.axhline(
            target,
            color="#555555",
            linewidth=1.0,
            linestyle=(0, (4, 3)),
            label=f"target {_value_text(target, quantity)}",
        )


def _value_text(value: float, quantity: Quantity) -> str:
    return f"{100 * value:.4g}%" if quantity.share else f"{value:.4g}"


def _label_panel(axes: Axes, curves: Sequence[Curve], quantity: Quantity) -> None:
    """Label the vertical axis, and add a legend if there is more than one line."""
    axes.set_ylabel(textwrap.fill(quantity.label, _LABEL_LETTERS))
    if quantity.share:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=STEPS))
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) < 2:
        return
    most_seeds = 0
    has_published = False
    for curve in curves:
        most_seeds = max(most_seeds, len(curve.histories))
        has_published = has_published or curve.published is not None
    notes = []
    if most_seeds > 1:
        notes.append("line: mean of the seeds\nband: lowest to highest")
    if has_published:
        notes.append("triangle: published")
    add_legend(axes, handles, labels, title="\n".join(notes) or None)
