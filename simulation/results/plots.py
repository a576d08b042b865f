"""Plots of simulations: a quantity over rounds, accuracy over emulated time or bytes, and who
trained which tier.

Every function returns a figure of its own; nothing of matplotlib's global state is touched, so they
may be called from any thread. A curve is a method or a setting, with one history for each seed: its
line is their mean, its band goes from the lowest to the highest.
"""

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal, TypeAlias

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import DataError
from models.tier import Tier
from simulation.results.history import ACCURACY, Judged, Quantity, RoundRow

# Okabe and Ito's palette stays apart for colour-blind readers; yellow is left out, which is faint
# on white. When the picture is grey the line styles tell curves apart; there are as many pairs as
# both have no common divisor.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_LINES = ("-", "--", ":", "-.")
_ORDERED = "cividis"  # made for colour-blind readers, dark to light also in grey
_GRID_POINTS = 400
_STEPS = (1, 2, 5, 10)  # between ticks, times a power of ten
_BARS = (
    200  # of a plot of tiers; more rounds are averaged, or the bars would be thinner than a pixel
)
_HEIGHT, _AROUND = (
    3.8,
    1.0,
)  # inches: of a figure, and of it above and below what stands beside the axes
_WIDTH, _TWO_WIDE, _ROW = (
    7.6,
    13.0,
    2.5,
)  # inches: of a figure, of two panels in a row, and the height of a row
_LEGEND_LETTERS, _LABEL_LETTERS = (
    36,
    24,
)  # in a line of a legend, and of what stands beside an axis
_UNITS = (
    (7200.0, 3600.0, "hours"),
    (300.0, 60.0, "minutes"),
    (0.0, 1.0, "seconds"),
)  # from so many seconds on

_DEVICE_HEIGHT = 0.1  # inches

_Values: TypeAlias = NDArray[np.float64]
_Spent: TypeAlias = Callable[[Sequence[Judged]], _Values]


@dataclass(frozen=True)
class Curve:
    """What one line of a plot shows; those that follow each other with the same panel share one."""

    label: str  # for the legend
    histories: Sequence[Sequence[Judged]]  # the rounds of each seed, in order; at least one seed
    published: float | None = (
        None  # value that a paper prints for it, to be marked at the right edge
    )
    panel: str = ""  # stands above it
    targets: Sequence[
        float
    ] = ()  # values that it is to reach, each of which is a line in its panel


@dataclass(frozen=True)
class Widths:
    """Which width every device trained in every round of a run."""

    label: str  # stands above it
    devices: Sequence[str]  # what each is; equal ones that follow each other share a label
    by_round: Mapping[
        int, Sequence[float | None]
    ]  # a width for each device, None for one that did not take part


@dataclass(frozen=True)
class _Band:
    """Values of all the seeds at the same places: float64 [places], and float64 [seeds, places]."""

    places: _Values
    values: _Values


_BandOf: TypeAlias = Callable[[Curve], _Band]


def over_rounds(
    curves: Sequence[Curve], *, quantity: Quantity = ACCURACY, title: str = ""
) -> Figure:
    """A quantity after each round in which it was evaluated.

    A DataError where no curve has an evaluated round.
    """
    figure = _panels(curves, lambda curve: _by_round(curve, quantity), quantity, "round", title)
    for axes in figure.axes:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=_STEPS))
    return figure


def accuracy_over(
    what: Literal["time", "bytes"], curves: Sequence[Curve], *, title: str = ""
) -> Figure:
    """Test accuracy over emulated time, or megabytes of weights and updates.

    Seeds reach a round at different times, so their accuracies are interpolated between rounds, and
    shown as far as every seed goes.

    Raises:
        DataError: no curve has an evaluated round.
    """
    longest = max(
        (rows[-1].simulated_total for curve in curves for rows in curve.histories if rows),
        default=0.0,
    )
    scale, unit = next((scale, unit) for least, scale, unit in _UNITS if longest >= least)
    label = "MB of payload" if what == "bytes" else f"simulated time, {unit}"

    def spent(rows: Sequence[Judged]) -> _Values:
        used = [
            row.payload_bytes / 1e6 if what == "bytes" else row.simulated_total / scale
            for row in rows
        ]
        return np.cumsum(used) if what == "bytes" else np.array(used)

    figure = _panels(curves, lambda curve: _by_spent(curve, spent), ACCURACY, label, title)
    for axes in figure.axes:
        axes.set_xlim(left=0)
    return figure


def _panels(
    curves: Sequence[Curve],
    band_of: _BandOf,
    quantity: Quantity,
    label: str,
    title: str,
) -> Figure:
    panels = [(name, [*drawn]) for name, drawn in groupby(curves, lambda curve: curve.panel)] or [
        ("", [])
    ]
    figure, found = _figure(title, len(panels))
    for axes, (name, drawn) in zip(found, panels, strict=True):
        _draw(axes, drawn, band_of, quantity)
        for target in sorted({target for curve in drawn for target in curve.targets}):
            shown = f"target {_shown(target, quantity)}"
            axes.axhline(
                target,
                color="#555555",
                linewidth=1.0,
                linestyle=(0, (4, 3)),
                label=shown,
            )
        axes.set_title(name, loc="left", fontsize=9)
        axes.set_xlabel(label)
        _finish(axes, drawn, quantity)
    return figure


def widths_by_device(runs: Sequence[Widths], *, title: str = "") -> Figure:
    """The width of every device in every round, a picture for each of at least one run.

    Wide is dark, absent white.
    """
    found = sorted(
        {
            width
            for run in runs
            for row in run.by_round.values()
            for width in row
            if width is not None
        }
    )
    colours = ListedColormap(mpl.colormaps[_ORDERED](np.linspace(0.92, 0.0, len(found))))
    heights = [max(len(run.devices) * _DEVICE_HEIGHT, 1.0) for run in runs]
    figure = Figure(
        figsize=(_WIDTH, sum(heights) + _AROUND * (len(runs) + 1) / 2),
        layout="constrained",
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, wrap=True)
    for axes, run in zip(
        figure.subplots(len(runs), squeeze=False, height_ratios=heights)[:, 0],
        runs,
        strict=True,
    ):
        places = [
            [np.nan if width is None else found.index(width) for width in row]
            for row in run.by_round.values()
        ]
        edges = np.array([*run.by_round, max(run.by_round) + 1]) - 0.5
        starts = [
            at for at, name in enumerate(run.devices) if at == 0 or run.devices[at - 1] != name
        ]
        ends = [*starts[1:], len(run.devices)]
        drawn = axes.pcolormesh(
            edges,
            np.arange(len(run.devices) + 1),
            np.array(places).T,
            cmap=colours,
            norm=BoundaryNorm(np.arange(len(found) + 1) - 0.5, max(len(found), 1)),
        )
        axes.hlines(starts[1:], edges[0], edges[-1], color="white", linewidth=1.0)
        axes.set_yticks([(start + end) / 2 for start, end in zip(starts, ends, strict=True)])
        axes.set_yticklabels([run.devices[start] for start in starts])
        axes.invert_yaxis()
        axes.set_title(run.label, loc="left", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=_STEPS))
    axes.set_xlabel("round")
    bar = figure.colorbar(drawn, ax=figure.axes, label="width", ticks=range(len(found)))
    bar.ax.set_yticklabels([f"{width:g}" for width in found])
    return figure


def tier_counts(rows: Sequence[RoundRow], *, title: str = "") -> Figure:
    """How many devices trained each tier in each round, the largest tier at the bottom.

    Many rounds are shown as means over neighbouring ones; the axis says of how many.

    Raises:
        DataError: there is no round.
    """
    if not rows:
        raise DataError("there is no round to plot; simulate at least one")
    tiers = sorted({tier for row in rows for tier in row.tiers}, key=Tier.parse, reverse=True)
    size = -(-len(rows) // _BARS)
    starts = range(0, len(rows), size)
    # A bar is as wide as the distance to the next one, and a round is drawn around its number.
    edges = np.array([*(rows[start].round for start in starts), rows[-1].round + 1]) - 0.5
    figure, (axes,) = _figure(title)
    below = np.zeros(len(starts))
    for tier, colour in zip(
        tiers, mpl.colormaps[_ORDERED](np.linspace(0.0, 0.92, len(tiers))), strict=True
    ):
        counts = np.array([row.tiers.get(tier, 0) for row in rows], dtype=np.float64)
        top = below + np.add.reduceat(counts, starts) / np.diff([*starts, len(rows)])
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
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, max(below.max() * 1.05, 1))
    axes.set_xlabel("round")
    axes.set_ylabel("devices" if size == 1 else f"devices, mean of {size} rounds")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=_STEPS))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, steps=_STEPS))
    handles, labels = axes.get_legend_handles_labels()
    _legend(
        axes, handles[::-1], labels[::-1], title="tier"
    )  # in the order in which they are stacked
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Write a figure in the format of the path's suffix, ``.png``, ``.svg`` or ``.pdf``, and return
    the path.

    Raises:
        StorageError: the file cannot be written.
    """
    buffer = io.BytesIO()
    # A figure without a date or version of its writer has the same bytes for the same numbers.
    metadata: Mapping[str, dict[str, None]] = {
        "svg": {"Date": None},
        "png": {"Software": None},
    }
    kind = path.suffix.removeprefix(".")
    figure.savefig(buffer, format=kind, dpi=150, metadata=metadata.get(kind))
    write_atomically(path, buffer.getbuffer())
    return path


def plot_run(folder: Path, rows: Sequence[RoundRow], *, title: str = "") -> tuple[Path, ...]:
    """Write the plots of one run beside its history.

    Returns:
        ``accuracy.png`` and ``accuracy_time.png``, if a round was evaluated, and ``tiers.png``.

    Raises:
        DataError: there is no round.
        StorageError: the folder cannot be written.
    """
    drawn = {"tiers.png": tier_counts(rows, title=title)}
    if any(row.accuracy is not None for row in rows):
        curve = Curve("accuracy", (rows,))
        drawn["accuracy.png"] = over_rounds((curve,), title=title)
        drawn["accuracy_time.png"] = accuracy_over("time", (curve,), title=title)
    return tuple(save(figure, folder / name) for name, figure in sorted(drawn.items()))


def _figure(title: str, panels: int = 1) -> tuple[Figure, list[Axes]]:
    columns = min(panels, 2)
    rows = -(-panels // 2)
    figure = Figure(
        figsize=((_WIDTH, _TWO_WIDE)[columns - 1], max(_HEIGHT, rows * _ROW)),
        layout="constrained",
    )
    found = [figure.add_subplot(rows, columns, number + 1) for number in range(panels)]
    for axes in found:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, wrap=True)
    return figure, found


def _draw(axes: Axes, curves: Sequence[Curve], band_of: _BandOf, quantity: Quantity) -> None:
    drawn = 0
    for number, curve in enumerate(curves):
        band = band_of(curve)
        if not band.places.size:
            continue
        drawn += 1
        colour = _COLOURS[number % len(_COLOURS)]
        style = _LINES[number % len(_LINES)]
        mean = band.values.mean(axis=0)
        seeds = len(band.values)
        label = f"{curve.label} ({seeds} seeds)" if seeds > 1 else curve.label
        label += (
            "" if curve.published is None else f", published {_shown(curve.published, quantity)}"
        )
        marker = "o" if band.places.size == 1 else None
        axes.plot(
            band.places,
            mean,
            color=colour,
            linestyle=style,
            linewidth=1.8,
            marker=marker,
            label=label,
        )
        if curve.published is not None:
            # At the edge of the axes, whatever their scale.
            (mark,) = axes.plot(
                1.0,
                curve.published,
                "<",
                color=colour,
                transform=axes.get_yaxis_transform(),
            )
            mark.set_clip_on(False)
        if seeds > 1:
            low = band.values.min(axis=0)
            high = band.values.max(axis=0)
            axes.fill_between(band.places, low, high, color=colour, alpha=0.18, linewidth=0)
    if not drawn:
        raise DataError(
            f"no round was evaluated, so there is no {quantity.name} to plot; give the simulation a test set"
        )


def _by_round(curve: Curve, quantity: Quantity) -> _Band:
    """The rounds that every seed evaluated."""
    found = [
        {row.round: value for row in rows if (value := quantity.value(row)) is not None}
        for rows in curve.histories
    ]
    common = sorted(set.intersection(*map(set, found))) if found else []
    values = [[seed[number] for number in common] for seed in found]
    return _Band(np.array(common, dtype=np.float64), np.array(values, dtype=np.float64))


def _by_spent(curve: Curve, spent: _Spent) -> _Band:
    """All seeds on one grid, from where the last one has its first value to the end of the
    shortest.
    """
    found = [
        np.array(
            [
                (x, row.accuracy)
                for x, row in zip(spent(rows), rows, strict=True)
                if row.accuracy is not None
            ]
        )
        for rows in curve.histories
    ]
    if not found or any(not len(points) for points in found):
        return _Band(np.empty(0), np.empty((len(found), 0)))
    first = max(points[0, 0] for points in found)
    last = min(points[-1, 0] for points in found)
    if first > last:
        return _Band(np.empty(0), np.empty((len(found), 0)))
    # One seed keeps its own points.
    grid = found[0][:, 0] if len(found) == 1 else np.unique(np.linspace(first, last, _GRID_POINTS))
    return _Band(
        grid,
        np.array([np.interp(grid, points[:, 0], points[:, 1]) for points in found]),
    )


def _shown(value: float, quantity: Quantity) -> str:
    return f"{100 * value:.4g}%" if quantity.share else f"{value:.4g}"


def _finish(axes: Axes, curves: Sequence[Curve], quantity: Quantity) -> None:
    axes.set_ylabel(textwrap.fill(quantity.label, _LABEL_LETTERS))
    if quantity.share:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=_STEPS))
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        words = (
            ["line: mean of the seeds\nband: lowest to highest"]
            if any(len(c.histories) > 1 for c in curves)
            else []
        )
        words += (
            ["triangle: published"] if any(curve.published is not None for curve in curves) else []
        )
        _legend(axes, handles, labels, title="\n".join(words) or None)


def _legend(
    axes: Axes, handles: Sequence[Artist], labels: Sequence[str], *, title: str | None
) -> None:
    """A legend to the right of the axes, where it hides no data.

    The figure is as high as it needs.
    """
    figure = axes.figure.figure
    made = axes.legend(
        handles,
        [textwrap.fill(label, _LEGEND_LETTERS) for label in labels],
        title=title,
        frameon=False,
        fontsize=9,
        title_fontsize=9,
        alignment="left",
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        borderaxespad=0.0,
    )
    if len(figure.axes) == 1:
        figure.set_figheight(max(_HEIGHT, made.get_window_extent().height / figure.dpi + _AROUND))


def _tier_label(tier: str) -> str:
    shape = Tier.parse(tier)
    return (
        f"width {shape.width:g}"
        if shape.depth == 1
        else f"width {shape.width:g}, depth {shape.depth}"
    )
