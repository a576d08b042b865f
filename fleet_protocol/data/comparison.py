"""Finds differences between a board's samples and the fleet's, with figures.

The bounds let honest boards pass: those with a single label, subject or machine of real data sets.
docs/data.md lists how far such boards stay from each bound.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.data.dataset import DataSet
from fleet_protocol.data.facts import shape_remedy
from fleet_protocol.data.inspection import NAMED, DataFinding, inspect
from fleet_protocol.data.pairs import Pair
from fleet_protocol.data.summary import DataSummary, are_tokens, summarise

MUCH = 10.0
"""Factor by which all values are larger or smaller, or one column is larger, in a finding."""
VERY_MUCH = 50.0
"""The same for a single smaller column, or for a column that nearly always has one value."""
FAR = 10.0
"""Distance of a mean in a finding, in deviations."""
ELSEWHERE = 3.0
"""Distance of a mean that may belong to another column, in deviations."""

_LEAST_VALUES = 20  # per group, on both sides: a deviation of fewer values means little
_AS_OTHERS = "set `scale`, `mean` and `std` in [data] as the other boards have them"


def find_problems(data: DataSet, fleet: DataSummary | None = None) -> tuple[DataFinding, ...]:
    """Find what looks wrong in samples, and what looks different from the fleet's.

    Args:
        data: a board's samples.
        fleet: the fleet's contract, if known.
    """
    alone = inspect(data, fleet)
    if fleet is None:
        return alone
    return (
        *alone,
        *compare(summarise(data, tokens=are_tokens(fleet)), fleet, data.column_names),
    )


def compare(
    own: DataSummary, fleet: DataSummary, columns: Sequence[str] = ()
) -> tuple[DataFinding, ...]:
    """Find differences between a board's samples and the fleet's.

    Args:
        own: summary of a board's samples.
        fleet: summary of the fleet's samples.
        columns: names of the columns, if any.

    Returns:
        Another shape, scale of all values or type, as the only finding; else columns in another
        order, columns with another scale, and distant means.
    """
    if own.shape != fleet.shape:
        return (_shape(own, fleet),)
    if own.groups != fleet.groups or min(_values(own), _values(fleet)) < _LEAST_VALUES:
        return ()
    pair = Pair.of(own, fleet, columns)
    whole = _scale_of_all(pair)
    if whole is not None:
        return (whole,)
    if are_tokens(fleet) and not own.whole:
        return (_dtype(own, fleet),)
    return tuple(_by_group(pair))


def _values(summary: DataSummary) -> int:
    """Return how many values of each group were examined."""
    return summary.drawn * math.prod(summary.shape) // len(summary.mean)


def _shape(own: DataSummary, fleet: DataSummary) -> DataFinding:
    remedy = shape_remedy(own.shape, fleet.shape)
    return DataFinding(
        "shape",
        f"samples have shape {[*own.shape]}, the fleet's have {[*fleet.shape]}; {remedy}",
    )


def _dtype(own: DataSummary, fleet: DataSummary) -> DataFinding:
    return DataFinding(
        "dtype",
        f"values have fractions ({own.dtype}, from {min(own.lowest):g} to {max(own.highest):g}), the fleet's "
        f"are whole numbers ({fleet.dtype}, from {min(fleet.lowest):g} to {max(fleet.highest):g}); leave "
        "`scale`, `mean` and `std` out of [data], and save integers",
    )


def _scale_of_all(pair: Pair) -> DataFinding | None:
    """Return whether most groups have values many times larger or smaller than the fleet's."""
    spread = pair.vary & pair.fleet.dense
    counted = spread if spread.any() else pair.vary
    if not counted.any():
        return None
    times = float(np.median(pair.deviations[counted]))
    if 1 / MUCH < times < MUCH:
        return None
    own = pair.own
    fleet = pair.fleet
    ends = [
        float(end)
        for end in (
            own.lowest.min(),
            own.highest.max(),
            fleet.lowest.min(),
            fleet.highest.max(),
        )
    ]
    at_zero = ends[0] == ends[2] == 0.0
    remedy = f"multiply `scale` in [data] by {ends[3] / ends[1]:.4g}" if at_zero else _AS_OTHERS
    more = f"{times:.3g} times larger" if times > 1 else f"{1 / times:.3g} times smaller"
    return DataFinding(
        "scale",
        f"values range from {ends[0]:g} to {ends[1]:g}, the fleet's range from {ends[2]:g} to {ends[3]:g} "
        f"(their deviation is {more}); {remedy}",
    )


def _by_group(pair: Pair) -> Iterator[DataFinding]:
    """Return the findings of single columns or channels."""
    up = np.minimum(pair.deviations, pair.ranges)
    down = np.minimum(1 / pair.deviations, 1 / pair.ranges)
    scaled = (up >= VERY_MUCH) | (down >= VERY_MUCH) | ((up >= MUCH) & pair.fleet.dense)
    distances = np.diagonal(pair.distances)
    places = _places(pair, scaled | (distances >= ELSEWHERE))
    moved = places != np.arange(len(places))
    if moved.any():
        yield _order(pair, places)
    other_scale = np.flatnonzero(scaled & ~moved).tolist()
    if other_scale:
        yield _scale(pair, other_scale)
    off = np.flatnonzero((distances >= FAR) & ~scaled & ~moved).tolist()
    if off:
        yield _mean(pair, off, distances)


def _places(pair: Pair, misfits: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Match each of the board's columns with one of the fleet's.

    The columns are in another order if every column that does not look like itself fits another
    place, and each place is used once: a perfect matching, found by augmenting paths (Kuhn 1955).
    """
    count = len(misfits)
    own_places = np.arange(count)
    if pair.noun != "column" or misfits.sum() < 2:
        return own_places
    allowed = pair.alike | np.diag(~misfits)
    allowed[misfits, misfits] = False
    holders: dict[int, int] = {int(i): int(i) for i in np.flatnonzero(~misfits)}
    for i in np.flatnonzero(misfits).tolist():
        if not _seat(i, allowed, holders, set()):
            return own_places
    places = np.empty(count, np.int64)
    places[list(holders.values())] = list(holders)
    return places


def _seat(
    column: int, allowed: NDArray[np.bool_], holders: dict[int, int], tried: set[int]
) -> bool:
    """Give a column a possible place, and move the column there to another.

    Return False if there is none.
    """
    free_first = sorted(
        np.flatnonzero(allowed[column]).tolist(), key=lambda place: place in holders
    )
    for place in free_first:
        if place in tried:
            continue
        tried.add(place)
        if place not in holders or _seat(holders[place], allowed, holders, tried):
            holders[place] = column
            return True
    return False


def _order(pair: Pair, places: NDArray[np.int64]) -> DataFinding:
    moved = [(i, j) for i, j in enumerate(places.tolist()) if i != j]
    shown = [
        f"{pair.name(i)} (mean {pair.own.mean[i]:.4g}) looks like the fleet's column {j} "
        f"(mean {pair.fleet.mean[j]:.4g}, and {pair.fleet.mean[i]:.4g} in column {i})"
        for i, j in moved[:NAMED]
    ]
    more = f", and {len(moved) - NAMED} more" if len(moved) > NAMED else ""
    return DataFinding(
        "order",
        f"columns are in another order than the fleet's: {', '.join(shown)}{more}; list them in `columns` "
        "of [data], in the order of the other boards",
    )


def _scale(pair: Pair, groups: Sequence[int]) -> DataFinding:
    which = pair.name(*groups)
    first = f"{pair.name(groups[0])} ranges " if len(groups) > 1 else ""
    have = f"{which} have another scale: {first}" if first else f"{which} ranges "
    return DataFinding(
        "scale",
        f"{have}{pair.shown(groups[0])}; check their units, and the number that replaces missing values there",
    )


def _mean(pair: Pair, groups: Sequence[int], distances: NDArray[np.float64]) -> DataFinding:
    i = groups[0]
    which = f"{pair.name(*groups)} " if pair.noun else ""
    verb = "are far off" if len(groups) > 1 else "is far off" if which else "values are far off"
    own = pair.own
    fleet = pair.fleet
    of = f"{pair.name(i)} has " if len(groups) > 1 else ""
    return DataFinding(
        "mean",
        f"{which}{verb}: {of}mean {own.mean[i]:.4g}, the fleet's is {fleet.mean[i]:.4g} ({distances[i]:.3g} "
        f"deviations away); check their units, or {_AS_OTHERS}",
    )
