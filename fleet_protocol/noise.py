"""What hides one device's part: a bound on how far an update may move, and Gaussian noise from
random bytes.

The Gaussian mechanism of differential privacy: Dwork and Roth, 2014, "The Algorithmic Foundations
of Differential Privacy", appendix A. In a fleet the bytes are the operating system's, are kept
nowhere, and nobody can draw them again.
"""

import hashlib
import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Draw = Callable[[int], bytes]
"""So many random bytes: ``os.urandom``, or in a simulation what :func:`seeded` gives."""

Tensors = Mapping[str, NDArray[np.float32]]
_BLOCK = 1 << 19  # pairs of values made at once
_MARGIN = 1 - 1e-6  # what float32 may round up when an update is scaled to the bound


def seeded(text: str) -> Draw:
    """Bytes that are the same for the same text, for simulations alone: whoever knows the text can
    draw them again.
    """
    return np.random.Generator(
        np.random.PCG64(int.from_bytes(hashlib.sha256(text.encode()).digest(), "big"))
    ).bytes


def gaussian(draw: Draw, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Independent standard normal values, by Box and Muller's transform of uniform values of 53
    bits.
    """
    size = math.prod(shape)
    values = np.empty(size + size % 2)
    for start in range(0, len(values), 2 * _BLOCK):
        part = values[start : start + 2 * _BLOCK]
        words = np.frombuffer(draw(8 * len(part)), "<u8")
        uniform = (
            (words >> np.uint64(11)) + 0.5
        ) * 2.0**-53  # never 0, whose logarithm is not finite
        radius = np.sqrt(-2 * np.log(uniform[::2]))
        angle = 2 * np.pi * uniform[1::2]
        part[::2], part[1::2] = radius * np.cos(angle), radius * np.sin(angle)
    return values[:size].reshape(shape)


def bounded(update: Tensors, sent: Tensors, clip: float) -> dict[str, NDArray[np.float32]]:
    """An update's difference to what was sent, scaled down where its Euclidean norm over all
    tensors exceeds `clip`.

    It is not finite where the update is not, or is beyond all floats.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        change = {name: value - sent[name] for name, value in update.items()}
        square = sum(float(np.square(value, dtype=np.float64).sum()) for value in change.values())
        scale = np.float32(min(1.0, _MARGIN * clip / math.sqrt(square)) if square else 1.0)
        return {name: value * scale for name, value in change.items()}
