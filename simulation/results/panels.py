"""Draws curves into the panels of a figure: lines, bands, published values and targets."""

import textwrap
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fleet_protocol.errors import DataError
from simulation.results.curves import Band, Curve
from simulation.results.figures import COLOURS, LINES, STEPS, add_legend, new_figure
from simulation.results.quantities import Quantity

_LABEL_LETTERS = 24  # characters in a line of an axis label


BandOf: TypeAlias = Callable[[Curve], Band]


def plot_panels(
    curves: Sequence[Curve],
    band_of: BandOf,
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
    band_of: BandOf,
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
    band: Band,
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
