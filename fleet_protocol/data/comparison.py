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
from fleet_protocol.data.inverted import is_inverted
from fleet_protocol.data.pairs import Pair
from fleet_protocol.data.shifted import is_shifted
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
    # Without the fleet, samples can only be compared with themselves.
    own_findings = inspect(data, fleet)
    if fleet is None:
        return own_findings
    # Both sides are summarised in the same way, or their figures would differ.
    own = summarise(data, tokens=are_tokens(fleet))
    return (*own_findings, *compare(own, fleet, data.column_names))


def compare(
    own: DataSummary, fleet: DataSummary, columns: Sequence[str] = ()
) -> tuple[DataFinding, ...]:
    """Find differences between a board's samples and the fleet's.

    Args:
        own: summary of a board's samples.
        fleet: summary of the fleet's samples.
        columns: names of the columns, if any.

    Returns:
        Another shape, scale of all values, inverted images or another type, as the only finding;
        else columns in another order, columns with another scale, and distant means.
    """
    # Figures of samples with another shape cannot be compared.
    if own.shape != fleet.shape:
        return (_shape(own, fleet),)
    if own.groups != fleet.groups or min(_values(own), _values(fleet)) < _LEAST_VALUES:
        return ()
    pair = Pair.from_summaries(own, fleet, columns)
    common_scale = _scale_of_all(pair)
    if common_scale is not None:
        # Then every group differs, and nothing more can be learnt from them.
        return (common_scale,)
    if is_shifted(pair):
        return (_shift(pair),)
    if is_inverted(pair):
        return (_inversion(pair),)
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
        f"samples have shape {[*own.shape]}, but the fleet's have {[*fleet.shape]}; {remedy}",
    )


def _dtype(own: DataSummary, fleet: DataSummary) -> DataFinding:
    return DataFinding(
        "dtype",
        f"values have fractions ({own.dtype}, from {min(own.lowest):g} to {max(own.highest):g}), "
        f"but the fleet's are whole numbers ({fleet.dtype}, from {min(fleet.lowest):g} to "
        f"{max(fleet.highest):g}); leave `scale`, `mean` and `std` out of [data], and save "
        "integers",
    )


def _scale_of_all(pair: Pair) -> DataFinding | None:
    """Return a finding if most groups are many times larger or smaller than the fleet's."""
    # Sparse columns, such as indicators, have deviations that depend on few samples.
    spread = pair.vary & pair.fleet.dense
    counted = spread if spread.any() else pair.vary
    if not counted.any():
        return None
    # The median: a few groups with another scale are separate findings.
    times = float(np.median(pair.deviations[counted]))
    if 1 / MUCH < times < MUCH:
        return None
    own_lowest = float(pair.own.lowest.min())
    own_highest = float(pair.own.highest.max())
    fleet_lowest = float(pair.fleet.lowest.min())
    fleet_highest = float(pair.fleet.highest.max())
    remedy = _AS_OTHERS
    # With a common lowest value of 0, a factor explains the difference.
    if own_lowest == fleet_lowest == 0.0:
        remedy = f"multiply `scale` in [data] by {fleet_highest / own_highest:.4g}"
    ratio = f"{times:.3g} times larger" if times > 1 else f"{1 / times:.3g} times smaller"
    return DataFinding(
        "scale",
        f"values range from {own_lowest:g} to {own_highest:g}, but the fleet's range from"
        f" {fleet_lowest:g} to {fleet_highest:g} (their deviation is {ratio}); {remedy}",
    )


def _shift(pair: Pair) -> DataFinding:
    """Return the finding that one side has no negative values, and the other in all groups."""
    return DataFinding(
        "scale",
        f"values range from {pair.own.lowest.min():g} to {pair.own.highest.max():g}, but the"
        f" fleet's range from {pair.fleet.lowest.min():g} to {pair.fleet.highest.max():g}, so only"
        f" one of them is standardised or shifted; {_AS_OTHERS}",
    )


def _inversion(pair: Pair) -> DataFinding:
    own_mean = float(pair.own.mean.mean())
    fleet_mean = float(pair.fleet.mean.mean())
    highest = float(pair.fleet.highest.max())
    return DataFinding(
        "inverted",
        "images look inverted, white where the fleet's are black: their mean is"
        f" {own_mean:.4g}, and the fleet's is {fleet_mean:.4g} with values up to {highest:g};"
        " invert them as the other boards have them, with a function in `transforms` of [data]",
    )


def _by_group(pair: Pair) -> Iterator[DataFinding]:
    """Yield the findings of single columns or channels."""
    # Both must grow, because a few outliers change only the range.
    up = np.minimum(pair.deviations, pair.ranges)
    down = np.minimum(1 / pair.deviations, 1 / pair.ranges)
    scaled = (up >= VERY_MUCH) | (down >= VERY_MUCH) | ((up >= MUCH) & pair.fleet.dense)
    # Each group beside the same group of the fleet.
    distances = np.diagonal(pair.distances)
    places = _match_columns(pair, scaled | (distances >= ELSEWHERE))
    moved = places != np.arange(len(places))
    if moved.any():
        yield _order(pair, places)
    with_other_scale = np.flatnonzero(scaled & ~moved).tolist()
    if with_other_scale:
        yield _scale(pair, with_other_scale)
    # A column with another scale or place has a distant mean because of that.
    far_off = np.flatnonzero((distances >= FAR) & ~scaled & ~moved).tolist()
    if far_off:
        yield _mean(pair, far_off, distances)


def _match_columns(pair: Pair, misfits: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Match each of the board's columns with one of the fleet's.

    The columns are in another order if every column that does not look like itself fits another
    place, and each place is used once: a perfect matching, found by augmenting paths (Kuhn 1955).
    """
    count = len(misfits)
    own_places = np.arange(count)
    # A single column cannot have changed places.
    if pair.noun != "column" or misfits.sum() < 2:
        return own_places
    # Columns that look right may stay, or move if another column needs their place.
    allowed = pair.alike | np.diag(~misfits)
    # A column that does not look like itself must not stay at its place.
    allowed[misfits, misfits] = False
    holders = {column: column for column in np.flatnonzero(~misfits).tolist()}
    for column in np.flatnonzero(misfits).tolist():
        if not _find_place(
            column,
            allowed,
            holders,
            set(),
        ):
            return own_places
    places = np.empty(count, np.int64)
    # `holders` has columns by place, and the result places by column.
    places[list(holders.values())] = list(holders)
    return places


def _find_place(
    column: int, allowed: NDArray[np.bool_], holders: dict[int, int], tried: set[int]
) -> bool:
    """Give a column a possible place, and move the column there to another.

    Args:
        column: column of the board.
        allowed: which columns may be at which places.
        holders: columns by their places; changed here.
        tried: places that were tried for this column or the columns it moves.

    Returns:
        Whether there is a place.
    """
    candidates = np.flatnonzero(allowed[column]).tolist()
    # Free places first, because they end the search.
    free_first = sorted(candidates, key=lambda place: place in holders)
    for place in free_first:
        if place in tried:
            continue
        tried.add(place)
        if place not in holders or _find_place(
            holders[place],
            allowed,
            holders,
            tried,
        ):
            holders[place] = column
            return True
    return False


def _order(pair: Pair, places: NDArray[np.int64]) -> DataFinding:
    own = pair.own.mean
    fleet = pair.fleet.mean
    descriptions = []
    for column, place in enumerate(places.tolist()):
        if column != place:
            descriptions.append(
                f"{pair.name(column)} (mean {own[column]:.4g}) looks like the fleet's column "
                f"{place} (mean {fleet[place]:.4g}, and {fleet[column]:.4g} in column {column})"
            )
    hidden = len(descriptions) - NAMED
    more = f", and {hidden} more" if hidden > 0 else ""
    return DataFinding(
        "order",
        "columns are in a different order from the fleet's:"
        f" {', '.join(descriptions[:NAMED])}{more}; list them in `columns` of [data],"
        " in the order of the other boards",
    )


def _scale(pair: Pair, groups: Sequence[int]) -> DataFinding:
    first = groups[0]
    subject = f"{pair.name(first)} ranges "
    if len(groups) > 1:
        subject = f"{pair.name(*groups)} have another scale: {subject}"
    return DataFinding(
        "scale",
        f"{subject}{pair.describe(first)}; check their units, and the number that replaces missing "
        "values there",
    )


def _mean(
    pair: Pair,
    groups: Sequence[int],
    distances: NDArray[np.float64],
) -> DataFinding:
    first = groups[0]
    if len(groups) > 1:
        subject = f"{pair.name(*groups)} are far off: {pair.name(first)} has "
    elif pair.noun:
        subject = f"{pair.name(first)} is far off: "
    else:
        subject = "values are far off: "
    return DataFinding(
        "mean",
        f"{subject}mean {pair.own.mean[first]:.4g}, but the fleet's is "
        f"{pair.fleet.mean[first]:.4g} ({distances[first]:.3g} deviations away); check their "
        f"units, or {_AS_OTHERS}",
    )
