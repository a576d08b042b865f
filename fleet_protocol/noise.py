"""Hides one device's part in a sum: a bound on its update, and Gaussian noise from random bytes.

The Gaussian mechanism of differential privacy: Dwork and Roth, 2014, "The Algorithmic Foundations
of Differential Privacy", appendix A. In a fleet the bytes come from the operating system and are
not stored, so they cannot be drawn again.
"""

import hashlib
import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Draw = Callable[[int], bytes]
"""Returns a number of random bytes: ``os.urandom``, or for simulations from :func:`seeded`."""

Tensors = Mapping[str, NDArray[np.float32]]
_PAIRS_AT_ONCE = 1 << 19
_MARGIN = 1 - 1e-6  # margin for float32 rounding when an update is scaled to the bound


def seeded(text: str) -> Draw:
    """Return a source of bytes that are the same for the same text.

    It is for simulations only: anyone who knows the text can draw the bytes again.
    """
    digest = hashlib.sha256(text.encode()).digest()
    seed = int.from_bytes(digest, "big")
    return np.random.Generator(np.random.PCG64(seed)).bytes


def gaussian(draw: Draw, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return independent standard normal values.

    Box and Muller's transform makes them of uniform values of 53 bits.
    """
    size = math.prod(shape)
    values = np.empty(size + size % 2)
    for start in range(0, len(values), 2 * _PAIRS_AT_ONCE):
        block = values[start : start + 2 * _PAIRS_AT_ONCE]
        words = np.frombuffer(draw(8 * len(block)), "<u8")
        # The half keeps every value above 0, whose logarithm is not finite.
        uniform = ((words >> np.uint64(11)) + 0.5) * 2.0**-53
        radius = np.sqrt(-2 * np.log(uniform[::2]))
        angle = 2 * np.pi * uniform[1::2]
        block[::2] = radius * np.cos(angle)
        block[1::2] = radius * np.sin(angle)
    return values[:size].reshape(shape)


def bounded(
    update: Tensors,
    sent: Tensors,
    clip: float,
) -> dict[str, NDArray[np.float32]]:
    """Return an update's difference from the weights that were sent, with a bounded norm.

    It is scaled down if its Euclidean norm over all tensors exceeds `clip`. It is not finite if the
    update is not, or overflows.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        change = {name: value - sent[name] for name, value in update.items()}
        # `sum` adds floats more exactly than a loop does (since Python 3.12), so it must stay.
        square = sum(float(np.square(value, dtype=np.float64).sum()) for value in change.values())
        factor = min(1.0, _MARGIN * clip / math.sqrt(square)) if square else 1.0
        scale = np.float32(factor)
        return {name: value * scale for name, value in change.items()}
