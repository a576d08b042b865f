"""Krum: merges those updates of a tier that are closest to the others.

Peva Blanchard, El Mahdi El Mhamdi, Rachid Guerraoui, Julien Stainer: "Machine Learning with
Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS 2017, https://arxiv.org/abs/1703.02757,
section 3; as Multi-Krum (section 5) with m = n - f. The score of an update is the sum of its
squared distances to the n - f - 2 closest others, and the n - f updates with the smallest scores
are merged. Sub-models are compared if they contain the same entries: inside a tier, and with one
plan for all of it.

The paper's proof requires n > 2 f + 2. A tier with fewer devices than that leaves out as many as it
can, and one with fewer than five none.
"""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from broker_server.strategies.stage import Stage, stated
from broker_server.strategies.traits import Trait
from models.slicing import Tensors

# Distances between updates are defined only if the updates have the same entries, all of them.
STAGES = stated(
    Stage(
        name='robust.merge = "krum"',
        remedy='set robust.merge = "mean"',
        setting="robust.merge",
        wanted=lambda run: run.robust.merge == "krum",
        needs=frozenset({Trait.SINGLE, Trait.ONE_VERSION, Trait.WHOLE, Trait.SHARED_PLANS}),
        breaks=frozenset({Trait.INDEPENDENT}),
    ),
)

_BLOCK = 32 * 1024  # values of every update that are compared at once, in float64


def squared_distances(updates: Mapping[str, Tensors]) -> NDArray[np.float64]:
    """Return the squared distances between all pairs of updates, a symmetric matrix.

    Args:
        updates: updates with the same tensors, by task.
    """
    tensors = list(updates.values())
    count = len(tensors)
    total = np.zeros((count, count))
    for name in tensors[0]:
        rows = [update[name].reshape(-1) for update in tensors]
        size = rows[0].size
        # The order of tensors and blocks determines the bits of the scores.
        for start in range(0, size, _BLOCK):
            end = start + _BLOCK
            blocks = np.stack([row[start:end] for row in rows])
            total += _block_distances(blocks.astype(np.float64))
    return np.maximum(total, 0.0)  # rounding may make a distance of 0 negative


def _block_distances(block: NDArray[np.float64]) -> NDArray[np.float64]:
    # Centred, so that small distances are not lost in large products.
    block -= block.mean(axis=0)
    products = block @ block.T
    squares = np.diag(products)
    # For each pair |a|^2 + |b|^2 - 2 a.b, which is |a - b|^2.
    sums = squares[:, None] + squares[None, :]
    distances: NDArray[np.float64] = sums - 2 * products
    return distances


def left_out(updates: Mapping[str, Tensors], faulty: float) -> tuple[str, ...]:
    """Return the updates that are not merged, the worst first.

    Args:
        updates: updates of a tier, all cut by one plan, by task.
        faulty: share of the devices that may be faulty, in [0, 0.5).
    """
    count = len(updates)
    # Rounded first: the product of a share may be a little more than a whole number.
    share = math.ceil(round(faulty * count, 9))
    bad = min(share, (count - 3) // 2)
    if bad < 1:
        return ()
    distances = np.sort(squared_distances(updates), axis=1)
    # The first of each row is the distance of an update to itself.
    closest = distances[:, 1 : count - bad - 1]
    scores = closest.sum(axis=1)
    # Stable, so that of equal scores the same update is left out in every run.
    order = np.argsort(-scores, kind="stable")
    tasks = list(updates)
    worst = []
    for index in order[:bad]:
        worst.append(tasks[index])
    return tuple(worst)
