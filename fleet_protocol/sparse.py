"""Selects the largest entries of tensors, and writes their positions as gaps of a byte each.

Stich, Cordonnier and Jaggi, NeurIPS 2018, https://arxiv.org/abs/1809.07599; by tensor as Lin, Han,
Mao, Wang and Dally, ICLR 2018, https://arxiv.org/abs/1712.01887.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import RefusalReason, RefusedError

Places = NDArray[np.int64]

_CONTINUED = 255  # this many entries, and the gap continues in the next byte


def count_kept(size: int, keep: float) -> int:
    """Return how many entries of a tensor are kept, given their share."""
    return math.ceil(size * keep)


def largest_places(tensor: NDArray[np.float32], count: int) -> Places:
    """Return the positions of the entries with the largest magnitude, in ascending order.

    If entries are equal, the first are selected. NaN counts as largest, so that it is sent and
    refused.
    """
    if not count:
        return np.zeros(0, np.int64)
    magnitudes = np.abs(tensor)
    np.nan_to_num(magnitudes, copy=False, nan=np.inf, posinf=np.inf)
    least = np.partition(magnitudes, -count)[-count]
    chosen = magnitudes > least
    remaining = count - np.count_nonzero(chosen)
    chosen[np.flatnonzero(magnitudes == least)[:remaining]] = True
    places: Places = np.flatnonzero(chosen)
    return places


def encode_gaps(places: Places) -> NDArray[np.uint8]:
    """Return how many entries are between each position and the previous one."""
    between = np.diff(places, prepend=-1) - 1
    ends = np.cumsum(between // _CONTINUED + 1)
    gaps = np.full(ends[-1] if ends.size else 0, _CONTINUED, np.uint8)
    gaps[ends - 1] = between % _CONTINUED
    return gaps


def decode_gaps(
    gaps: NDArray[Any],
    sizes: Sequence[int],
    kept: Sequence[int],
) -> Places:
    """Return the positions from `encode_gaps`.

    Args:
        gaps: output of `encode_gaps`.
        sizes: entries of each tensor.
        kept: entries of each tensor that are kept.

    Raises:
        RefusedError: there are more or fewer entries of a tensor than are kept.
    """
    is_last_byte = gaps != _CONTINUED
    ends = np.cumsum(gaps.astype(np.int64) + is_last_byte)
    places: Places = ends[is_last_byte] - 1
    tensor_ends = np.cumsum([0, *sizes])
    counts = np.diff(np.searchsorted(places, tensor_ends)).tolist()
    is_cut_off = bool(gaps.size) and not is_last_byte[-1]
    if counts != list(kept) or places.size != sum(kept) or is_cut_off:
        raise RefusedError(
            RefusalReason.BAD_SHAPE,
            f"the gaps of topk name {places.size} entries, {counts} of its tensors, but "
            f"{list(kept)} of {list(sizes)} are kept",
        )
    return places
