"""Merging entry by entry from the values of those that hold it: the median and the trimmed mean.

Dong Yin, Yudong Chen, Kannan Ramchandran, Peter Bartlett: "Byzantine-Robust Distributed Learning:
Towards Optimal Statistical Rates", ICML 2018, https://arxiv.org/abs/1803.01498, algorithm 1,
options I (the coordinate-wise median) and II (the coordinate-wise trimmed mean).

The paper's devices send gradients of one model; here they send weights, of which the statistic is
that of the updates moved by the weights they all started from. Sub-models of any plan take part: as
in HeteroFL an entry is decided by those that hold it, rows of the output layer by those that hold
the label, and nobody counts twice for having more samples. All values are needed at once: updates
are read from disk when the round closes, parameter by parameter.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from broker_server.strategies.server_optimizer import OptimizerSettings
from broker_server.strategies.strategy import Average, Contribution, Merge, average_and_step
from models.slicing import Tensors, tensor_regions

Floats = NDArray[np.float32]
Counts = NDArray[np.intp]


def robust_merge(
    average: Average,
    faulty: float,
    optimizer: OptimizerSettings | None,
    *,
    label_rule: bool,
) -> Merge[list[Contribution]]:
    """A merge that takes a statistic of every entry.

    With a label rule its rows count from those that hold the label.

    The share of an entry's holders that may be faulty is trimmed at either end, rounded up.
    """
    statistic = _STATISTICS[average]

    def start() -> list[Contribution]:
        return []

    def merged(updates: list[Contribution], old: Tensors) -> dict[str, Floats]:
        return {
            name: _of_holders(
                _values(name, updates, old[name], label_rule=label_rule),
                old[name],
                statistic,
                faulty,
            )
            for name in old
        }

    return Merge(start, list.append, average_and_step(merged, optimizer), average)


def _values(name: str, updates: Sequence[Contribution], old: Floats, *, label_rule: bool) -> Floats:
    """The values of one parameter by holder, NaN where it does not hold an entry.

    Sorted entry by entry.
    """
    holders = [update for update in updates if name in update.plan.tensors]
    values = np.full((len(holders), *old.shape), np.nan, np.float32)
    for value, update in zip(values, holders, strict=True):
        tensor = update.plan.tensors[name]
        rows = np.unique(np.array(update.metrics.labels, np.int64))
        axes = dict.fromkeys(update.plan.label_axes, rows) if label_rule else None
        for box in tensor_regions(tensor, axes):
            value[box.whole] = update.weights[name][box.part]
    values.sort(axis=0)  # what nobody holds comes last, as NaN does
    return values


def _of_holders(
    values: Floats,
    old: Floats,
    statistic: Callable[[Floats, Counts, float], Floats],
    faulty: float,
) -> Floats:
    count = np.count_nonzero(~np.isnan(values), axis=0)
    if not len(values) or not count.any():
        return np.array(old)
    return np.where(count > 0, statistic(values, count, faulty), old).astype(np.float32, copy=False)


def _median(values: Floats, count: Counts, _faulty: float) -> Floats:
    """Of an even number of values the mean of the middle two."""
    middle = [np.maximum(place, 0)[None] for place in ((count - 1) // 2, count // 2)]
    low, high = (np.take_along_axis(values, place, axis=0)[0] for place in middle)
    found: Floats = low / 2 + high / 2  # halves first: the sum of two large floats may be no float
    return found


def _trimmed_mean(values: Floats, count: Counts, faulty: float) -> Floats:
    """The mean of what is left.

    Where so much is trimmed that nothing would be, of the middle one or two.
    """
    trimmed = np.minimum(
        np.ceil(np.round(faulty * count, 9)).astype(np.intp),
        np.maximum(count - 1, 0) // 2,
    )
    total = np.zeros(count.shape, np.float64)
    for place, value in enumerate(values):
        total += np.where((place >= trimmed) & (place < count - trimmed), value, 0.0)
    found: Floats = (total / np.maximum(count - 2 * trimmed, 1)).astype(np.float32)
    return found


_STATISTICS: Mapping[Average, Callable[[Floats, Counts, float], Floats]] = MappingProxyType(
    {"median": _median, "trimmed_mean": _trimmed_mean}
)
