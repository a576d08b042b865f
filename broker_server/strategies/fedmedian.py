"""FedMedian: the median of the devices that hold an entry, so that few broken or malicious devices cannot move it.

Dong Yin, Yudong Chen, Kannan Ramchandran, Peter Bartlett: "Byzantine-Robust Distributed Learning: Towards Optimal
Statistical Rates", ICML 2018, https://arxiv.org/abs/1803.01498, algorithm 1, option I (the coordinate-wise median).

The paper's devices send gradients of one model; here they send weights, of which the median is that of the updates
moved by the weights they all started from. Sub-models of any plan take part: as in HeteroFL an entry is decided by
those that hold it, rows of the output layer by those that hold the label, and nobody counts twice for having more
samples. A median needs all values at once: updates are read from disk when the round closes, parameter by parameter.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from broker_server.config import StrategyConfig
from broker_server.strategies import heterofl
from broker_server.strategies.strategy import Contribution, Strategy
from fleet_protocol.errors import PlanError
from models.layout import Layout
from models.slicing import Tensors, tensor_regions

__all__ = ["build", "median_of_holders"]

Floats = NDArray[np.float32]


def build(config: StrategyConfig) -> Strategy:
    """The strategy as configured.

    Args:
        config: plan kind; ``label_rule`` defaults to on.

    Raises:
        PlanError: weights by samples are configured.
    """
    if config.weighting == "samples":
        raise PlanError('fedmedian counts every device alike; remove weighting = "samples"')
    label_rule = config.label_rule is not False

    def finish(updates: list[Contribution], old: Tensors) -> dict[str, Floats]:
        return {name: median_of_holders(name, updates, old[name], label_rule=label_rule) for name in old}

    def start(_layout: Layout) -> list[Contribution]:
        return []

    return replace(
        heterofl.build(config),
        name="fedmedian",
        paper="https://arxiv.org/abs/1803.01498",
        start=start,
        fold=list.append,
        finish=finish,
    )


def median_of_holders(name: str, updates: list[Contribution], old: Floats, *, label_rule: bool) -> Floats:
    """The median of one parameter, entry by entry, over the updates that hold the entry.

    Args:
        name: the parameter.
        updates: of one round.
        old: its value before the round, float32; entries that nobody holds keep it.
        label_rule: whether rows of label axes count only from devices that hold the label.

    Returns:
        Float32 of the same shape; of an even number of values the mean of the middle two.
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
    count = np.count_nonzero(~np.isnan(values), axis=0)
    if not holders or not count.any():
        return np.array(old)
    middle = [np.maximum(place, 0)[None] for place in ((count - 1) // 2, count // 2)]
    low, high = (np.take_along_axis(values, place, axis=0)[0] for place in middle)
    # Halves first: the sum of two large floats may be no float.
    return np.where(count > 0, low / 2 + high / 2, old).astype(np.float32, copy=False)
