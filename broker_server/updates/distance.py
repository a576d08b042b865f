"""Measures how far an update is from the weights that were sent to its device, for all screens."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker_server.stages.update import Distance

# As many values as fit into a processor's cache: their differences are computed at once.
_BLOCK = 64 * 1024


def measure(
    update: Mapping[str, NDArray[Any]],
    sent: Mapping[str, NDArray[Any]],
) -> Distance:
    """Measure the difference between an update and the sent weights, over all tensors.

    Squares are float32, or float64 if they are too large for that; values below 1e-22 count as
    zero.

    Args:
        update: float32 tensors by name.
        sent: tensors of the same names and shapes.

    Returns:
        The Euclidean norm and the number of entries. The norm is not finite if a value is not.
    """
    total = 0.0
    count = 0
    with np.errstate(over="ignore", invalid="ignore"):
        for name, value in update.items():
            new = value.reshape(-1)
            old = sent[name].reshape(-1)
            count += new.size
            # The order of the blocks determines the bits of the norm, which the store keeps.
            for start in range(0, new.size, _BLOCK):
                end = start + _BLOCK
                total += _square(new[start:end], old[start:end])
    return Distance(math.sqrt(total), count)


def _square(new: NDArray[Any], old: NDArray[Any]) -> float:
    """Return the sum of the squared differences of a block."""
    block = new - old
    square = float(np.multiply(block, block, out=block).sum())
    if math.isfinite(square):
        return square
    wide = new.astype(np.float64) - old
    return float(wide @ wide)
