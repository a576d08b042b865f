"""Keeps a parameter's values by their positions in the whole model.

A tier with moving units has other units in each round (`fleet_protocol.units`). The values that a
device keeps of a parameter then have the shape of the whole model, as far as the device has trained
it.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.units import Positions

Array = NDArray[Any]


def values_at(kept: Array, positions: Positions, sent: Array) -> Array:
    """Return the kept values of a sub-model's entries, and the sent ones where nothing is kept.

    Args:
        kept: values by their positions in the whole model, NaN where nothing is kept; it ends
            behind the last position that was ever kept.
        positions: the positions of the entries.
        sent: values of the sub-model as the server sent them.

    Returns:
        A new array with the shape and type of `sent`.
    """
    sizes = _sizes(positions, kept.shape)
    known = _resized(kept, sizes)[np.ix_(*positions)]
    values: Array = np.where(np.isnan(known), sent, known)
    return values


def keep_at(kept: Array | None, positions: Positions, values: Array) -> Array:
    """Return what a device keeps after a round, as an array like `kept` of `values_at`.

    Args:
        kept: what it kept before; None if nothing.
        positions: the positions of the trained entries.
        values: the trained values of the sub-model.
    """
    before = np.empty((0,) * values.ndim, values.dtype) if kept is None else kept
    after = _resized(before, _sizes(positions, before.shape))
    after[np.ix_(*positions)] = values
    return after


def _sizes(positions: Positions, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return sizes that hold an array of a shape and the positions."""
    sizes: list[int] = []
    for dim, size in zip(positions, shape, strict=True):
        sizes.append(max(int(dim.max()) + 1, size))
    return tuple(sizes)


def _resized(values: Array, sizes: tuple[int, ...]) -> Array:
    """Return a copy with at least the same sizes; new entries are NaN."""
    larger = np.full(sizes, np.nan, values.dtype)
    larger[tuple(map(slice, values.shape))] = values
    return larger
