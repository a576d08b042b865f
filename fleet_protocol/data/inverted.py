"""Tells from means that a board's images are negatives of the fleet's.

Both have the same range, so the mean tells: that of a negative is the mirror image of the
original's, in the middle of the range. Images that are as bright as dark, such as photographs, look
alike either way.
"""

import numpy as np

from fleet_protocol.data.pairs import Pair

_APART = 0.7  # least distance from the fleet's mean, in deviations
_NEAR = 0.4  # most distance from the mirrored mean, as a share of the distance from the mean itself


def is_inverted(pair: Pair) -> bool:
    """Return whether the board's values lie where the fleet's would lie if they were inverted.

    Args:
        pair: figures of a board and of the fleet with the same groups.
    """
    # A table's columns are never inverted together, and a board of one label may have any means.
    if pair.noun == "column" or not pair.vary.any():
        return False
    fleet = pair.fleet
    mirrored = fleet.lowest + fleet.highest - fleet.mean
    unit = np.maximum(pair.own.deviation, fleet.deviation)[pair.vary]
    from_mean = np.abs(pair.own.mean - fleet.mean)[pair.vary] / unit
    from_mirrored = np.abs(pair.own.mean - mirrored)[pair.vary] / unit
    apart = float(np.median(from_mean))
    near = float(np.median(from_mirrored))
    return apart >= _APART and near <= _NEAR * apart
