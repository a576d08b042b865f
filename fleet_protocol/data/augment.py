"""Random changes to training images: crops at a random place, and mirror images (specification 1.8)."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

__all__ = ["PADDING", "Augment", "crop_flip"]

Augment = Literal["none", "crop-flip"]

PADDING = 4
"""Black pixels on each side of an image before it is cropped to its size again."""


def crop_flip(
    images: NDArray[np.float32], black: NDArray[np.float32], generator: np.random.Generator
) -> NDArray[np.float32]:
    """Crop and mirror images at random, as HeteroFL's training does for CIFAR-10.

    Each image is padded by 4 black pixels on all sides, cropped to its size at a random place, and mirrored with
    probability 1/2. The generator is asked for ``integers(0, 9, (2, B))``, how far down and how far to the right each
    crop lies, and then for ``random(B)``, below 1/2 for those that are mirrored.

    Args:
        images: normalised, float32 ``[B, channels, height, width]``.
        black: what a black pixel becomes when it is normalised, float32 that broadcasts against one image.
        generator: of the draw.

    Returns:
        New images of the same shape.
    """
    count, channels, height, width = images.shape
    padded = np.empty((count, channels, height + 2 * PADDING, width + 2 * PADDING), np.float32)
    padded[:] = black
    padded[:, :, PADDING:-PADDING, PADDING:-PADDING] = images
    down, right = generator.integers(0, 2 * PADDING + 1, (2, count))
    mirrored = generator.random(count) < 0.5
    crops = sliding_window_view(padded, (height, width), axis=(2, 3))
    cropped: NDArray[np.float32] = crops[np.arange(count), :, down, right]
    cropped[mirrored] = cropped[mirrored, :, :, ::-1]
    return cropped
