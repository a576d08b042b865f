"""Figures of a common style: sizes, colours, ticks, legends, and output to files.

Figures do not use matplotlib's global state, so they may be created in any thread.
"""

import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fleet_protocol.blob_store import write_atomically

# Okabe and Ito's palette for colour-blind readers, without yellow, which is faint on white. Line
# styles distinguish curves in grey; the numbers of colours and styles are coprime, so all pairs
# occur.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
LINES = ("-", "--", ":", "-.")
ORDERED = mpl.colormaps["cividis"]  # for colour-blind readers, dark to light also in grey
STEPS = (1, 2, 5, 10)  # between ticks, times a power of ten
WIDTH = 7.6  # width in inches of a figure with one panel in a row
MARGIN = 1.0  # inches above and below the axes

_TWO_WIDE = 13.0  # width in inches of a figure with two panels in a row
_HEIGHT = 3.8  # minimum height of a figure in inches
_ROW = 2.5  # height of a row of panels in inches
_LEGEND_LETTERS = 36  # characters in a line of a legend


def new_figure(title: str, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure with this many panels, at most two in a row, and their axes in order."""
    columns = min(panels, 2)
    rows = -(-panels // 2)
    width = WIDTH if columns == 1 else _TWO_WIDE
    figure = Figure(figsize=(width, max(_HEIGHT, rows * _ROW)), layout="constrained")
    all_axes = [figure.add_subplot(rows, columns, number + 1) for number in range(panels)]
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
    if title:
        add_title(figure, title)
    return figure, all_axes


def add_title(figure: Figure, title: str) -> None:
    """Put a title at the top left of a figure."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, wrap=True)


def tick_rounds(axes: Axes) -> None:
    """Put the ticks of the horizontal axis at whole rounds."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=STEPS))


def add_legend(
    axes: Axes,
    handles: Sequence[Artist],
    labels: Sequence[str],
    *,
    title: str | None,
) -> None:
    """Put a legend to the right of the axes, so that it does not hide data.

    A figure with a single panel is at least as high as its legend.
    """
    figure = axes.figure.figure
    legend = axes.legend(
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
        legend_height = legend.get_window_extent().height / figure.dpi
        figure.set_figheight(max(_HEIGHT, legend_height + MARGIN))


def save(figure: Figure, path: Path) -> Path:
    """Write a figure in the format of the path's suffix, ``.png``, ``.svg`` or ``.pdf``.

    Returns:
        The path.

    Raises:
        StorageError: the file cannot be written.
    """
    buffer = io.BytesIO()
    # Without a date and a software version, equal numbers give equal bytes.
    metadata: Mapping[str, dict[str, None]] = {"svg": {"Date": None}, "png": {"Software": None}}
    kind = path.suffix.removeprefix(".")
    figure.savefig(buffer, format=kind, dpi=150, metadata=metadata.get(kind))
    write_atomically(path, buffer.getbuffer())
    return path
