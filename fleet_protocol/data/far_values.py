"""Finds numbers that stand for a missing value, such as -999, among the values of a column."""

import math
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST_MARKS = 2
"""Greatest number of different values that may be far away on one side of a column."""

_LEAST_SAMPLES = 3  # with one such value: an outlier seldom repeats exactly
_TIMES = 10.0  # distance from the other values, in ranges of these
_TIMES_OF_MARK = 1.0  # the same of numbers that programs and sensors write for a missing value
_TIMES_OF_FEW = (
    50.0  # the same if nearly all other values are the same, as in columns of rare events
)
_NINES = re.compile("-?99+")
# The ends of integer types, and what a thermometer shows without its sensor.
_MARKS = frozenset({-127, -128, -32768, 32767, 65535, -(2**31), 2**31 - 1, 2**32 - 1})
_SPREAD = 0.1  # deviation of the others as a share of their range, below which they are the same


@dataclass(frozen=True)
class FarValues:
    """Values of a column that are far from all others, and repeat.

    Attributes:
        marks: these values, ascending.
        count: number of samples with one of them.
        lowest: lowest of the other values.
        highest: highest of the other values.
    """

    marks: tuple[float, ...]
    count: int
    lowest: float
    highest: float

    def describe(self, samples: int) -> str:
        """Return the figures as the end of a sentence about the column.

        Args:
            samples: number of examined samples.
        """
        marks = " or ".join(f"{mark:g}" for mark in self.marks)
        return (
            f"is {marks} in {self.count} of {samples} examined samples, and from "
            f"{self.lowest:g} to {self.highest:g} in the others"
        )


def find_far_values(
    table: NDArray[np.float64], usual: tuple[float, ...] = ()
) -> dict[int, FarValues]:
    """Find values that repeat, and are far from all others.

    The distance is at least ten times the range of the others, or fifty times if nearly all of
    these are the same. Numbers that often mark missing values, such as -999 and 65535, need to be
    only one range away. The value 0 does not count, because it often means that nothing happened.

    Args:
        table: values ``[N, columns]``, at least one row.
        usual: further values that do not count.

    Returns:
        The columns that have such values, with these values.
    """
    ordered = np.sort(table, axis=0)
    largest_gaps = np.diff(ordered, axis=0).max(axis=0, initial=0.0)
    # The marks of both sides and the others have at most so many gaps of this size between them.
    is_possible = largest_gaps * (2 * MOST_MARKS + 1) >= ordered[-1] - ordered[0]
    found = {}
    for place in np.flatnonzero(is_possible & (largest_gaps > 0)).tolist():
        far = _in_column(ordered[:, place], usual)
        if far is not None:
            found[place] = far
    return found


def _in_column(column: NDArray[np.float64], usual: tuple[float, ...]) -> FarValues | None:
    """Return the far values of a column ``[N]``, if there are any and at least two others."""
    values, counts = np.unique(column, return_counts=True)
    best: FarValues | None = None
    for low in range(MOST_MARKS + 1):
        for high in range(MOST_MARKS + 1):
            found = _with_marks(values, counts, low, high)
            if found is None or {0.0, *usual} & set(found.marks):
                continue
            # As many as possible: each of them widens the range of the others.
            if best is None or len(found.marks) > len(best.marks):
                best = found
    return best


def _with_marks(
    values: NDArray[np.float64], counts: NDArray[np.int64], low: int, high: int
) -> FarValues | None:
    """Return the lowest and the highest values as far ones, if they are.

    Args:
        values: different values, ascending.
        counts: samples with each.
        low: how many of the lowest values may be far.
        high: how many of the highest.
    """
    end = len(values) - high
    others = values[low:end]
    marks = np.concatenate([values[:low], values[end:]])
    mark_counts = np.concatenate([counts[:low], counts[end:]])
    if len(others) < 2 or not len(marks) or mark_counts.min() < _LEAST_SAMPLES:
        return None
    lowest = float(others[0])
    highest = float(others[-1])
    other_counts = counts[low:end]
    mean = np.average(others, weights=other_counts)
    deviation = math.sqrt(np.average((others - mean) ** 2, weights=other_counts))
    are_spread = deviation >= _SPREAD * (highest - lowest)
    times = _TIMES if are_spread else _TIMES_OF_FEW
    if all(map(_is_usual_mark, marks.tolist())):
        times = _TIMES_OF_MARK
    least_distance = times * (highest - lowest)
    if low and lowest - values[low - 1] < least_distance:
        return None
    if high and values[end] - highest < least_distance:
        return None
    return FarValues(tuple(marks.tolist()), int(mark_counts.sum()), lowest, highest)


def _is_usual_mark(number: float) -> bool:
    """Return whether programs or sensors often write a number for a missing value."""
    return number in _MARKS or _NINES.fullmatch(f"{number:.0f}") is not None
