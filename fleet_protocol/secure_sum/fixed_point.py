"""The integers that a secure sum adds, and the conversion back."""

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.messages.values import SUM_LIMIT
from fleet_protocol.noise import Tensors, bounded

Words = NDArray[np.uint32]

STEPS = 2**31 // SUM_LIMIT - 1
"""Number of steps from zero to the bound of an entry."""


def whole_numbers(
    update: Tensors,
    sent: Tensors,
    clip: float,
) -> Words:
    """Return an update's difference from the weights that were sent, in integers modulo 2^32.

    Tensors are in the order of their names. The Euclidean norm over all tensors is `clip` at most,
    which also bounds every entry, and corresponds to `STEPS`.
    """
    change = bounded(update, sent, clip)
    joined = np.concatenate([change[name].reshape(-1) for name in sorted(change)])
    flat = joined.astype(np.float64)
    return np.rint(np.clip(flat / clip, -1, 1) * STEPS).astype(np.int64).astype(np.uint32)


def restored(total: Words, clip: float) -> NDArray[np.float64]:
    """Return the sum of differences from the sum of their integers."""
    return total.view(np.int32).astype(np.float64) * (clip / STEPS)
