"""Summarizes samples in figures: type, range, mean and deviation, as a model sees them."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from typing_extensions import Self

from fleet_protocol.data.dataset import DataSet
from fleet_protocol.errors import DataError
from fleet_protocol.frozen import FrozenModel

MOST_ROWS = 10_000
"""Greatest number of samples that are examined; of more, this many are drawn evenly."""
MOST_VALUES = 2**24
"""Greatest number of values that are examined; of large samples, fewer samples are examined."""
MOST_GROUPS = 256
"""Greatest number of columns or channels with separate figures.

With more, all values share one row of figures.
"""

_BLOCK_VALUES = 2**18  # a block of float64 takes 2 MB
_DIGITS = 6  # of a figure with a fraction, to keep messages short
_LARGEST = float(np.finfo(np.float32).max)
_EXACT = 2**53

_Size = Annotated[int, Field(ge=0, le=_EXACT)]
_Figure = Annotated[float, Field(ge=-_LARGEST * 1.01, le=_LARGEST * 1.01)]
_Figures = Annotated[tuple[_Figure, ...], Field(min_length=1, max_length=MOST_GROUPS)]

Grouping = Literal["columns", "channels", "all"]


class DataSummary(FrozenModel):
    """Figures of samples as a model sees them: after `scale`, `mean` and `std`; tokens unchanged.

    Each of the four figures has a value for every group: a column of flat samples, a channel (the
    first axis) of others, or all values, if there would be more than `MOST_GROUPS` groups.

    Attributes:
        shape: shape of one sample.
        dtype: element type of the values in the source, before any transformation.
        rows: number of samples in the data.
        drawn: number of samples that were examined.
        groups: which values are summarised together: those of each column, those of each channel,
            or all values.
        whole: whether all values that the model receives are whole numbers.
        lowest: lowest value of each group.
        highest: highest value of each group.
        mean: mean of each group.
        deviation: standard deviation of each group (the sum of the squared deviations is divided by
            the number of values).
    """

    shape: Annotated[tuple[_Size, ...], Field(max_length=32)]
    dtype: Annotated[str, Field(pattern="^[a-z]+[0-9]*$", max_length=16)]
    rows: _Size
    drawn: _Size
    groups: Grouping
    whole: bool
    lowest: _Figures
    highest: _Figures
    mean: _Figures
    deviation: _Figures

    @model_validator(mode="after")
    def _one_figure_a_group(self) -> Self:
        counts = {
            len(self.lowest),
            len(self.highest),
            len(self.mean),
            len(self.deviation),
        }
        if len(counts) != 1:
            raise ValueError("lowest, highest, mean and deviation need one figure for each group")
        return self


class _RunningFigures:
    """Figures of groups over all blocks so far; only one block is in memory at a time."""

    def __init__(self, groups: int) -> None:
        self.count = 0
        self.whole = True
        self.lowest = np.full(groups, np.inf)
        self.highest = np.full(groups, -np.inf)
        self.mean = np.zeros(groups)
        self._squares = np.zeros(groups)  # sums of squared distances from the mean

    def add(self, values: NDArray[np.float64]) -> None:
        """Add values ``[rows, groups, values of a group]``.

        Means and squares of two sets are combined as in Chan, Golub, LeVeque: "Updating formulae
        and a pairwise algorithm for computing sample variances", STAN-CS-79-773, 1979.
        """
        # In float64: sums of squares in float32 would lose small deviations.
        count = values.shape[0] * values.shape[2]
        mean = values.mean(axis=(0, 2))
        squares = np.square(values - mean[:, None]).sum(axis=(0, 2))
        total = self.count + count
        distance = mean - self.mean
        self._squares += squares + np.square(distance) * (self.count * count / total)
        self.mean += distance * (count / total)
        self.count = total
        np.minimum(self.lowest, values.min(axis=(0, 2)), out=self.lowest)
        np.maximum(self.highest, values.max(axis=(0, 2)), out=self.highest)
        self.whole = self.whole and bool((values == np.floor(values)).all())

    @property
    def deviation(self) -> NDArray[np.float64]:
        """The standard deviation of each group."""
        return np.asarray(np.sqrt(self._squares / self.count))


def summarise(data: DataSet, *, tokens: bool = False) -> DataSummary:
    """Summarize samples, in blocks and in float64.

    At most `MOST_ROWS` samples and `MOST_VALUES` values are examined, so that large data takes no
    longer; of more samples that many are drawn evenly (see `drawn_rows`). Lowest and highest cover
    only the examined samples.

    Args:
        data: at least one sample.
        tokens: whether the model takes whole numbers; they are never scaled.

    Returns:
        Figures with six digits; whole numbers up to 2**53 are exact.

    Raises:
        DataError: there is no value.
    """
    shape = data.x.shape[1:]
    if not len(data) or not math.prod(shape):
        raise DataError(
            f"{data.source} contains {len(data)} samples of shape {list(shape)}, which have no "
            "value"
        )
    groups, kind = _grouping(shape)
    # Fractions are not tokens, and must be seen as they are.
    are_whole = (tokens and data.x.dtype.kind in "biu") or _is_plain(data)
    figures = _RunningFigures(groups)
    rows = drawn_rows(len(data), MOST_VALUES // max(1, math.prod(shape)))
    with np.errstate(over="ignore"):  # a large scale may overflow float32
        for values in _blocks(
            data,
            rows,
            groups,
            tokens=are_whole,
        ):
            figures.add(values)
    return DataSummary(
        shape=shape,
        dtype=data.x.dtype.name,
        rows=len(data),
        drawn=len(rows),
        groups=kind,
        whole=figures.whole,
        lowest=_round(figures.lowest),
        highest=_round(figures.highest),
        mean=_round(figures.mean),
        deviation=_round(figures.deviation),
    )


def are_tokens(summary: DataSummary) -> bool:
    """Return whether samples may be tokens: unscaled whole numbers of an integer type."""
    return summary.whole and summary.dtype.startswith(("int", "uint"))


def drawn_rows(count: int, most: int = MOST_ROWS) -> NDArray[np.int64]:
    """Choose row numbers to examine, ascending: all if they are few, else evenly drawn ones.

    The rows are divided into equal stretches, one for each drawn row. A fixed seed picks the row in
    each stretch, since a fixed stride would always pick the same label if labels alternate. The
    same count gives the same rows.
    """
    most = max(1, min(most, MOST_ROWS))
    if count <= most:
        return np.arange(count)
    edges = np.arange(most + 1) * count // most
    places = np.random.default_rng(0).random(most)
    return edges[:-1] + (places * np.diff(edges)).astype(np.int64)


def _grouping(shape: tuple[int, ...]) -> tuple[int, Grouping]:
    """Return how many groups of values samples of a shape have, and what a group is."""
    if not shape or not 1 <= shape[0] <= MOST_GROUPS:
        return 1, "all"
    return shape[0], "columns" if len(shape) == 1 else "channels"


def _is_plain(data: DataSet) -> bool:
    """Return whether whole numbers reach the model unchanged, and need no rounding to float32."""
    changed = data.scale != 1.0 or bool(data.mean.any()) or bool((data.std != 1.0).any())
    return data.x.dtype.kind in "biu" and not changed


def _blocks(
    data: DataSet, rows: NDArray[np.int64], groups: int, *, tokens: bool
) -> Iterator[NDArray[np.float64]]:
    """Yield values as a model sees them, in blocks ``[rows, groups, values of a group]``."""
    block_rows = max(1, _BLOCK_VALUES // max(1, math.prod(data.x.shape[1:])))
    dtype = "int64" if tokens else "float32"
    for first in range(0, len(rows), block_rows):
        chosen = rows[first : first + block_rows]
        batch: NDArray[Any]
        batch, _ = data.batch(chosen, dtype)
        values = batch.astype(np.float64).reshape(len(chosen), groups, -1)
        yield np.clip(values, -_LARGEST, _LARGEST)


def _round(figures: NDArray[np.float64]) -> tuple[float, ...]:
    """Round figures for messages: whole numbers stay exact, others keep few digits."""
    return tuple(_round_figure(figure) for figure in figures.tolist())


def _round_figure(figure: float) -> float:
    is_exact = figure.is_integer() and abs(figure) <= _EXACT
    return figure if is_exact else float(f"{figure:.{_DIGITS}g}")
