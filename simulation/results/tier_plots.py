"""Plots the tier or width that each device trained in each round."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fleet_protocol.errors import DataError
from models.tier import HEAD_SHARE, WHOLE_SHARE, Tier
from simulation.results.figures import (
    MARGIN,
    ORDERED,
    STEPS,
    WIDTH,
    add_legend,
    add_title,
    new_figure,
    tick_rounds,
)
from simulation.results.rounds import RoundRow

_BARS = 200  # bars of a plot of tiers; with more bars than pixels, rounds are averaged
_DEVICE_HEIGHT = 0.1  # inches
_LIGHTEST = 0.92  # share of the colour map: colours beyond it are faint on white


_Values: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Widths:
    """The width that each device trained in each round of a run.

    Attributes:
        label: title of the picture.
        devices: the kind of each device; consecutive equal ones share a label.
        by_round: a width for each device, None for one that did not take part.
    """

    label: str
    devices: Sequence[str]
    by_round: Mapping[int, Sequence[float | None]]


def widths_by_device(runs: Sequence[Widths], *, title: str = "") -> Figure:
    """Plot the width of every device in every round, one picture per run.

    Wide is dark, absent white.
    """
    widths = _all_widths(runs)
    heights = []
    for run in runs:
        heights.append(max(len(run.devices) * _DEVICE_HEIGHT, 1.0))
    margins = MARGIN * (len(runs) + 1) / 2
    figure = Figure(figsize=(WIDTH, sum(heights) + margins), layout="constrained")
    add_title(figure, title)
    pictures = figure.subplots(len(runs), squeeze=False, height_ratios=heights)
    column = pictures[:, 0]
    for axes, run in zip(column, runs, strict=True):
        mesh = _draw_widths(axes, run, widths)
        _label_devices(axes, run)
        axes.set_title(run.label, loc="left", fontsize=9)
        tick_rounds(axes)
    axes.set_xlabel("round")
    bar = figure.colorbar(mesh, ax=figure.axes, label="width", ticks=range(len(widths)))
    names = [f"{width:g}" for width in widths]
    bar.ax.set_yticklabels(names)
    return figure


def _all_widths(runs: Iterable[Widths]) -> list[float]:
    widths: set[float | None] = set()
    for run in runs:
        for row in run.by_round.values():
            widths.update(row)
    return sorted(width for width in widths if width is not None)


def _edges(run: Widths) -> _Values:
    """Return the borders between rounds, each of which is drawn around its number."""
    numbers = [*run.by_round, max(run.by_round) + 1]
    return np.array(numbers) - 0.5


def _draw_widths(axes: Axes, run: Widths, widths: Sequence[float]) -> QuadMesh:
    """Draw a field for each device and round, coloured by the rank of its width."""
    # NaN stays white; it marks a device that did not take part.
    places = np.full((len(run.by_round), len(run.devices)), np.nan)
    for row, widths_of_round in zip(places, run.by_round.values(), strict=True):
        for device, width in enumerate(widths_of_round):
            if width is not None:
                row[device] = widths.index(width)
    shades = np.linspace(_LIGHTEST, 0.0, len(widths))
    borders = np.arange(len(widths) + 1) - 0.5
    return axes.pcolormesh(
        _edges(run),
        np.arange(len(run.devices) + 1),
        places.T,
        cmap=ListedColormap(ORDERED(shades)),
        norm=BoundaryNorm(borders, max(len(widths), 1)),
    )


def _label_devices(axes: Axes, run: Widths) -> None:
    """Separate the kinds of devices by white lines, and label each in its middle."""
    borders: list[int] = []
    middles: list[float] = []
    kinds: list[str] = []
    start = 0
    for kind, devices in groupby(run.devices):
        end = start + len(list(devices))
        borders.append(end)
        middles.append((start + end) / 2)
        kinds.append(kind)
        start = end
    edges = _edges(run)
    # The last border is that of the picture.
    axes.hlines(borders[:-1], edges[0], edges[-1], color="white", linewidth=1.0)
    axes.set_yticks(middles)
    axes.set_yticklabels(kinds)
    axes.invert_yaxis()


def tier_counts(rows: Sequence[RoundRow], *, title: str = "") -> Figure:
    """Plot the number of devices by tier in each round, with the largest tier at the bottom.

    Many rounds are shown as means over neighbouring ones; the axis gives their number.

    Raises:
        DataError: there is no round.
    """
    if not rows:
        raise DataError("there is no round to plot; simulate at least one")
    size = -(-len(rows) // _BARS)
    starts = range(0, len(rows), size)
    # A bar is as wide as the distance to the next one, and a round is drawn around its number.
    borders = [rows[start].round for start in starts]
    borders.append(rows[-1].round + 1)
    edges = np.array(borders) - 0.5
    figure, (axes,) = new_figure(title)
    top = _stack_tiers(axes, rows, starts, edges)
    highest = top.max() * 1.05
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, max(highest, 1))
    axes.set_xlabel("round")
    axes.set_ylabel("devices" if size == 1 else f"devices, mean of {size} rounds")
    tick_rounds(axes)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, steps=STEPS))
    handles, labels = axes.get_legend_handles_labels()
    # From top to bottom, as the tiers are stacked.
    add_legend(axes, handles[::-1], labels[::-1], title="tier")
    return figure


def _stack_tiers(
    axes: Axes,
    rows: Sequence[RoundRow],
    starts: Sequence[int],
    edges: _Values,
) -> _Values:
    """Draw stacked bars of the tiers, and return the height of each bar."""
    names: set[str] = set()
    for row in rows:
        names.update(row.tiers)
    tiers = sorted(names, key=Tier.parse, reverse=True)
    colours = ORDERED(np.linspace(0.0, _LIGHTEST, len(tiers)))
    rounds = np.diff([*starts, len(rows)])  # in each bar
    below = np.zeros(len(starts))
    for tier, colour in zip(tiers, colours, strict=True):
        by_round = [row.tiers.get(tier, 0) for row in rows]
        counts = np.array(by_round, dtype=np.float64)
        means = np.add.reduceat(counts, starts) / rounds
        top = below + means
        axes.stairs(
            top,
            edges,
            baseline=below,
            fill=True,
            color=colour,
            label=_tier_label(tier),
            linewidth=0,
        )
        below = top
    return below


def _tier_label(tier: str) -> str:
    shape = Tier.parse(tier)
    words = [f"width {shape.width:g}"]
    if shape.depth > 1:
        words.append(f"depth {shape.depth}")
    if shape.trained == HEAD_SHARE:
        words.append("head trained")
    elif shape.trained < WHOLE_SHARE:
        words.append(f"{shape.trained:g} trained")
    if shape.place:
        words.append(f"place {shape.place}")
    return ", ".join(words)
