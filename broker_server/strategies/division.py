"""Divides the sums of a merge by the total weights behind their entries.

See `broker_server.strategies.accumulator`. The entries of a few boxes usually have one weight each:
nested widths cut a matrix into rectangles. A box is divided by a number at the speed of memory. A
division by an array that is repeated along the positions of a kernel takes twice as long.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_MOST_BLOCKS = 64
"""Along one dimension; scattered units have more, and dividing each apart would be slower."""

Floats = NDArray[np.float32]
Box = tuple[slice, ...]


def divide(total: Floats, divisor: Floats, old: NDArray[Any]) -> None:
    """Divide sums in place; entries without any weight get their old values.

    Args:
        total: the sums of a parameter, changed in place.
        divisor: the total weight behind every entry, as an array that broadcasts to the sums.
        old: the parameter before the merge.
    """
    # A number by itself has no box.
    boxes = even_boxes(divisor) if divisor.ndim else None
    if boxes is None:
        _divide_each(total, divisor, old)
        return
    for box, weight in boxes:
        view = total[box]
        if weight == 0:
            np.copyto(view, old[box])
        else:
            np.divide(view, weight, out=view)


def even_boxes(divisor: Floats) -> list[tuple[Box, np.float32]] | None:
    """Return boxes that cover an array, each with the one number that all its entries have.

    Args:
        divisor: the array; a dimension of length 1 stands for any length.

    Returns:
        None if there are too many.
    """
    if divisor.ndim == 0:
        return [((), np.float32(divisor))]
    slices = _equal_slices(divisor)
    if len(slices) > _MOST_BLOCKS:
        return None
    boxes: list[tuple[Box, np.float32]] = []
    for block in slices:
        inner = even_boxes(divisor[block][0])
        if inner is None:
            return None
        for box, weight in inner:
            boxes.append(((block, *box), weight))
    return boxes


def _equal_slices(divisor: Floats) -> list[slice]:
    """Cut the first dimension where neighbours differ."""
    length = len(divisor)
    if length <= 1:
        return [slice(None)] * length
    by_row = divisor.reshape(length, -1)
    differs = (by_row[1:] != by_row[:-1]).any(axis=1)
    starts = [0, *(np.flatnonzero(differs) + 1).tolist()]
    ends = [*starts[1:], length]
    return [slice(start, end) for start, end in zip(starts, ends, strict=True)]


def _divide_each(total: Floats, divisor: Floats, old: NDArray[Any]) -> None:
    uncovered = divisor == 0
    if not uncovered.any():
        np.divide(total, divisor, out=total)
        return
    # A division by 0 would warn, though the old value replaces its result.
    divisor[uncovered] = 1
    np.divide(total, divisor, out=total)
    np.copyto(total, old, where=uncovered)
