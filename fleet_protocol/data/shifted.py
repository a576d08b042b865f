"""Tells from signs that only one side has shifted its values, as when one is standardised.

Images from 0 to 1 and the same from -1 to 1 differ by a factor of two, and columns before and after
standardising by a few deviations, which honest boards reach as well. But hardly any of them has
values on another side of zero in all columns.
"""

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.data.pairs import Figures, Pair

_LEAST_COLUMNS = 3  # single columns of few samples may have no negative value by chance
_BELOW = 0.1  # share of the range that lies below zero at least
_OTHER_SIZE = 1.5  # least factor between the deviations of images, whose channels are few


def is_shifted(pair: Pair) -> bool:
    """Return whether one side has no negative value in any group, and the other in each.

    Args:
        pair: figures of a board and of the fleet with the same groups.
    """
    # In columns that nearly always have one value, few samples lie on the other side.
    spread = pair.vary & pair.fleet.dense
    counted = spread if spread.any() else pair.vary
    if not counted.any():
        return False
    if pair.noun == "column":
        is_enough = int(counted.sum()) >= _LEAST_COLUMNS
    else:
        # A few channels, so their size must differ as well.
        times = float(np.median(pair.deviations[counted]))
        is_enough = max(times, 1 / times) >= _OTHER_SIZE
    own_negative, own_positive = _sides(pair.own, counted)
    fleet_negative, fleet_positive = _sides(pair.fleet, counted)
    opposite = (own_negative and fleet_positive) or (own_positive and fleet_negative)
    return is_enough and opposite


def _sides(figures: Figures, counted: NDArray[np.bool_]) -> tuple[bool, bool]:
    """Return whether all groups reach clearly below zero, and whether none has a negative value."""
    lowest = figures.lowest[counted]
    reaches_below = lowest <= -_BELOW * figures.range[counted]
    return bool(reaches_below.all()), bool((lowest >= 0).all())
