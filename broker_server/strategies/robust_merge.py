"""Merges by the median or the trimmed mean of the devices' values for each entry.

Dong Yin, Yudong Chen, Kannan Ramchandran, Peter Bartlett: "Byzantine-Robust Distributed Learning:
Towards Optimal Statistical Rates", ICML 2018, https://arxiv.org/abs/1803.01498, algorithm 1,
options I (the coordinate-wise median) and II (the coordinate-wise trimmed mean).

The paper's devices send gradients of one model. Here they send weights; their statistic is that of
the updates, shifted by the weights with which all devices started. Sub-models of any plan take
part: as in HeteroFL the devices that hold an entry determine it, and those that hold a label
determine the rows of the output layer. A device with more samples does not count more. All values
are needed at once: updates are read from disk when the round closes, parameter by parameter.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from broker_server.strategies.optimizer_rules import OptimizerSettings
from broker_server.strategies.stage import Stage, stated
from broker_server.strategies.strategy import Average, Contribution, Merge, average_and_step
from broker_server.strategies.traits import Trait
from models.slicing import Tensors, tensor_regions

Floats = NDArray[np.float32]
Counts = NDArray[np.intp]
Statistic = Callable[[Floats, Counts, float], Floats]
"""The statistic of sorted values [devices, ...], with their number and the faulty share."""

# An order of values has no weights, and needs values that started from the same ones.
STAGES = stated(
    Stage(
        name='robust.merge = "median" or "trimmed_mean"',
        remedy='set robust.merge = "mean"',
        setting="robust.merge",
        wanted=lambda run: run.robust.merge in {"median", "trimmed_mean"},
        needs=frozenset(
            {Trait.SINGLE, Trait.ONE_VERSION, Trait.WHOLE, Trait.ALIKE, Trait.OPEN_MERGE}
        ),
        breaks=frozenset({Trait.INDEPENDENT, Trait.MEAN_OF_CHANGES}),
    ),
)


def robust_merge(
    average: Average,
    faulty: float,
    optimizer: OptimizerSettings | None,
    *,
    label_rule: bool,
) -> Merge[list[Contribution]]:
    """Return a merge that computes a statistic of every entry.

    Args:
        average: the statistic, median or trimmed mean.
        faulty: the share of an entry's holders that may be faulty. The trimmed mean drops that
            share at either end, rounded up.
        optimizer: the server's optimizer, if any.
        label_rule: whether the rows of labels count only from devices that hold the label.
    """
    statistic = _STATISTICS[average]

    def start() -> list[Contribution]:
        return []

    def merged(updates: list[Contribution], old: Tensors) -> dict[str, Floats]:
        weights = {}
        for name, old_value in old.items():
            values = _sorted_values(
                name,
                updates,
                old_value,
                label_rule=label_rule,
            )
            weights[name] = _statistic_of_holders(
                values,
                old_value,
                statistic,
                faulty,
            )
        return weights

    return Merge(
        start,
        list.append,
        average_and_step(merged, optimizer),
        average,
    )


def _sorted_values(
    name: str,
    updates: Sequence[Contribution],
    old: Floats,
    *,
    label_rule: bool,
) -> Floats:
    """Return the devices' values of one parameter, sorted entry by entry.

    Returns:
        An array [holders, *shape], with NaN, last, for devices that do not hold an entry.
    """
    holders = [update for update in updates if name in update.plan.tensors]
    values = np.full((len(holders), *old.shape), np.nan, np.float32)
    for value, update in zip(values, holders, strict=True):
        tensor = update.plan.tensors[name]
        rows = np.unique(np.array(update.metrics.labels, np.int64))
        rows_by_axis = dict.fromkeys(update.plan.label_axes, rows) if label_rule else None
        for region in tensor_regions(tensor, rows_by_axis):
            value[region.whole] = update.weights[name][region.part]
    values.sort(axis=0)  # NaN sorts last
    return values


def _statistic_of_holders(
    values: Floats,
    old: Floats,
    statistic: Statistic,
    faulty: float,
) -> Floats:
    """Return the statistic of every entry; entries without a holder keep their old value."""
    count = np.count_nonzero(~np.isnan(values), axis=0)
    if not len(values) or not count.any():
        return np.array(old)
    # Without a holder, the old value replaces the statistic.
    merged = np.where(count > 0, statistic(values, count, faulty), old)
    return merged.astype(np.float32, copy=False)


def _median(
    values: Floats,
    count: Counts,
    _faulty: float,
) -> Floats:
    """Return the middle value, or the mean of the middle two of an even number."""
    low_place = np.maximum((count - 1) // 2, 0)[None]
    high_place = np.maximum(count // 2, 0)[None]
    low = np.take_along_axis(values, low_place, axis=0)[0]
    high = np.take_along_axis(values, high_place, axis=0)[0]
    # Halves first: the sum of two large floats may overflow.
    median: Floats = low / 2 + high / 2
    return median


def _trimmed_mean(
    values: Floats,
    count: Counts,
    faulty: float,
) -> Floats:
    """Return the mean without the lowest and the highest values.

    If there are few values, at least the middle one or two are kept.
    """
    # Rounded before it is rounded up: 0.07 * 100 is a little more than 7.
    wanted = np.ceil(np.round(faulty * count, 9)).astype(np.intp)
    most = np.maximum(count - 1, 0) // 2
    trimmed = np.minimum(wanted, most)
    total = np.zeros(count.shape, np.float64)
    for place, value in enumerate(values):
        is_kept = (place >= trimmed) & (place < count - trimmed)
        total += np.where(is_kept, value, 0.0)
    kept = np.maximum(count - 2 * trimmed, 1)
    mean: Floats = (total / kept).astype(np.float32)
    return mean


_STATISTICS: Mapping[Average, Statistic] = MappingProxyType(
    {"median": _median, "trimmed_mean": _trimmed_mean}
)
