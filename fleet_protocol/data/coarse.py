"""Finds columns whose values differ by less than float32 can represent so far from zero.

Samples are float32, which has 24 significant bits: beside 1,700,000,000, such as the seconds of a
clock, the next number is 128 away. Columns that vary by a few such steps have lost what varies.
"""

import numpy as np
from numpy.typing import NDArray

_LEAST_STEPS = 16.0  # deviation of a column in steps between two numbers of float32


def steps_of_float32(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for each column the distance of its largest value to the next number of float32.

    Args:
        table: values ``[rows, columns]``, at least one row.
    """
    largest = np.abs(table).max(axis=0).astype(np.float32)
    return np.asarray(np.spacing(largest), np.float64)


def coarse_columns(table: NDArray[np.float64]) -> list[int]:
    """Return the columns that vary by a few steps of float32, in order.

    A constant column varies by none, and is another finding.

    Args:
        table: as for `steps_of_float32`.
    """
    deviation = table.std(axis=0)
    varies = table.max(axis=0) > table.min(axis=0)
    is_coarse = varies & (deviation < _LEAST_STEPS * steps_of_float32(table))
    columns: list[int] = np.flatnonzero(is_coarse).tolist()
    return columns
