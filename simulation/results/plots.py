"""Plots of simulations: a quantity over rounds, and accuracy over emulated time or bytes.

A curve is a method or a setting, with one history for each seed: its line is their mean, its band
goes from the lowest to the highest.
"""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from simulation.results.history import ACCURACY, Judged, Quantity, RoundRow
from simulation.results.tier_plots import tier_counts

_GRID_POINTS = 400
_LABEL_LETTERS = 24  # in a line of the label of an axis
_UNITS = ((7200.0, 3600.0, "hours"), (300.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""From so many seconds on, an axis shows multiples of so many seconds, by their name."""

_Values: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """What one line of a plot shows; those that follow each other with the same panel share one.

    Attributes:
        label: for the legend.
        histories: the rounds of each seed, in order; at least one seed.
        published: value that a paper prints for it, to be marked at the right edge.
        panel: title of the panel.
        targets: values that it is to reach, each of which is a line in its panel.
    """

    label: str
    histories: Sequence[Sequence[Judged]]
    published: float | None = None
    panel: str = ""
    targets: Sequence[float] = ()


@dataclass(frozen=True)
class _Band:
    """Values of all the seeds at the same places."""

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


def accuracy_over(
    what: Literal["time", "bytes"], curves: Sequence[Curve], *, title: str = ""
) -> Figure:
    """Plot test accuracy over emulated time, or over megabytes of weights and updates.

    Seeds reach a round at different times, so their accuracies are interpolated between rounds, and
    shown as far as every seed goes.

    Raises:
        DataError: no curve has an evaluated round.
    """
    if what == "bytes":
        label = "MB of payload"
        figure = _plot_panels(curves, lambda curve: _by_spent(curve, _megabytes), ACCURACY, title)
    else:
        scale, unit = _time_unit(curves)
        label = f"simulated time, {unit}"
        figure = _plot_panels(
            curves,
            lambda curve: _by_spent(curve, lambda rows: _times(rows, scale)),
            ACCURACY,
            title,
        )
    for axes in figure.axes:
        axes.set_xlabel(label)
        axes.set_xlim(left=0)
    return figure


def plot_run(folder: Path, rows: Sequence[RoundRow], *, title: str = "") -> tuple[Path, ...]:
    """Write the plots of one run beside its history.

    Returns:
        ``accuracy.png`` and ``accuracy_time.png``, if a round was evaluated, and ``tiers.png``.

    Raises:
        DataError: there is no round.
        StorageError: the folder cannot be written.
    """
    figures = {"tiers.png": tier_counts(rows, title=title)}
    if any(row.accuracy is not None for row in rows):
        curve = Curve("accuracy", (rows,))
        figures["accuracy.png"] = over_rounds((curve,), title=title)
        figures["accuracy_time.png"] = accuracy_over("time", (curve,), title=title)
    return tuple(save(figure, folder / name) for name, figure in sorted(figures.items()))


# Places on the horizontal axis.


def _megabytes(rows: Sequence[Judged]) -> _Values:
    """Return the megabytes that were exchanged up to each round."""
    return np.cumsum([row.payload_bytes / 1e6 for row in rows])


def _times(rows: Sequence[Judged], scale: float) -> _Values:
    """Return the emulated time at the end of each round, in units of so many seconds."""
    return np.array([row.simulated_total / scale for row in rows])


def _time_unit(curves: Sequence[Curve]) -> tuple[float, str]:
    """Return the unit for the longest run, in seconds, and its name."""
    longest = 0.0
    for curve in curves:
        for rows in curve.histories:
            if rows:
                longest = max(longest, rows[-1].simulated_total)
    return next((scale, unit) for least, scale, unit in _UNITS if longest >= least)


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
    common = sorted(set.intersection(*map(set, seeds))) if seeds else []
    values: list[list[float]] = []
    for evaluated in seeds:
        values.append([evaluated[number] for number in common])
    return _Band(np.array(common, dtype=np.float64), np.array(values, dtype=np.float64))


def _by_spent(curve: Curve, spent: Callable[[Sequence[Judged]], _Values]) -> _Band:
    """Return the accuracies of all seeds on one grid.

    It goes from where the last seed has its first value to the end of the shortest.
    """
    seeds = [_accuracy_points(rows, spent(rows)) for rows in curve.histories]
    nothing = _Band(np.empty(0), np.empty((len(seeds), 0)))
    if not seeds or min(map(len, seeds)) == 0:
        return nothing
    first = max(points[0, 0] for points in seeds)
    last = min(points[-1, 0] for points in seeds)
    if first > last:
        return nothing
    grid = seeds[0][:, 0]  # one seed keeps its own points
    if len(seeds) > 1:
        grid = np.unique(np.linspace(first, last, _GRID_POINTS))
    values = [np.interp(grid, points[:, 0], points[:, 1]) for points in seeds]
    return _Band(grid, np.array(values))


def _accuracy_points(rows: Sequence[Judged], places: _Values) -> _Values:
    """Return the places and accuracies of the evaluated rounds, ``[rounds, 2]``."""
    points: list[tuple[float, float]] = []
    for place, row in zip(places, rows, strict=True):
        if row.accuracy is not None:
            points.append((place, row.accuracy))
    return np.array(points)


# Drawing.


def _plot_panels(
    curves: Sequence[Curve], band_of: _BandOf, quantity: Quantity, title: str
) -> Figure:
    """Draw curves that follow each other with the same panel into the same axes."""
    panels: list[tuple[str, list[Curve]]] = []
    for name, group in groupby(curves, lambda curve: curve.panel):
        panels.append((name, list(group)))
    if not panels:
        panels = [("", [])]
    figure, all_axes = new_figure(title, len(panels))
    for axes, (name, panel_curves) in zip(all_axes, panels, strict=True):
        _draw_curves(axes, panel_curves, band_of, quantity)
        _draw_targets(axes, panel_curves, quantity)
        axes.set_title(name, loc="left", fontsize=9)
        _label_panel(axes, panel_curves, quantity)
    return figure


def _draw_curves(axes: Axes, curves: Sequence[Curve], band_of: _BandOf, quantity: Quantity) -> None:
    drawn = 0
    for number, curve in enumerate(curves):
        band = band_of(curve)
        if band.places.size:
            drawn += 1
            _draw_curve(axes, curve, band, number, quantity)
    if not drawn:
        raise DataError(
            f"no round was evaluated, so there is no {quantity.name} to plot; give the simulation"
            " a test set"
        )


def _draw_curve(axes: Axes, curve: Curve, band: _Band, number: int, quantity: Quantity) -> None:
    """Draw the line, the published value and the band of a curve."""
    colour = COLOURS[number % len(COLOURS)]
    seeds = len(band.values)
    label = f"{curve.label} ({seeds} seeds)" if seeds > 1 else curve.label
    if curve.published is not None:
        label = f"{label}, published {_value_text(curve.published, quantity)}"
    axes.plot(
        band.places,
        band.values.mean(axis=0),
        color=colour,
        linestyle=LINES[number % len(LINES)],
        linewidth=1.8,
        marker="o" if band.places.size == 1 else None,
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
    """Label the vertical axis, and add a legend where there is more than one line."""
    axes.set_ylabel(textwrap.fill(quantity.label, _LABEL_LETTERS))
    if quantity.share:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=STEPS))
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) < 2:
        return
    notes = []
    if any(len(curve.histories) > 1 for curve in curves):
        notes.append("line: mean of the seeds\nband: lowest to highest")
    if any(curve.published is not None for curve in curves):
        notes.append("triangle: published")
    add_legend(axes, handles, labels, title="\n".join(notes) or None)
