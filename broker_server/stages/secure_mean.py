"""The mean of a secure sum, which represents each of the updates in it."""

import math
from collections.abc import Mapping

import numpy as np

from broker_server.stages.update import Tensors
from broker_server.strategies.stage import Stage, stated
from broker_server.strategies.traits import Trait
from fleet_protocol.secure_sum import Words, restored
from fleet_protocol.weights import encode_weights

# Nobody sees the terms of the sum, so everything needed to add integers must hold before the
# devices mask them.
STAGES = stated(
    Stage(
        name="[secure_sum]",
        remedy="remove [secure_sum]",
        setting="secure_sum",
        wanted=lambda run: run.secure_sum is not None,
        needs=frozenset(
            {
                Trait.LABELS_HIDDEN,
                Trait.ALIKE,
                Trait.ONE_VERSION,
                Trait.COMPLETE,
                Trait.WHOLE,
                Trait.SERVER_NOISE,
                Trait.MEAN_OF_CHANGES,
                Trait.ASSIGNED_TIERS,
                Trait.SHARED_PLANS,
                Trait.NO_STATISTICS,
            }
        ),
        breaks=frozenset({Trait.SINGLE, Trait.EVALUATIONS}),
    ),
)

_ROUNDED = 1.001  # rounding to integers may put a norm above its bound


def mean_of_sum(
    total: Words,
    count: int,
    clip: float,
    shapes: Mapping[str, tuple[int, ...]],
    sent: Tensors,
) -> bytes:
    """Return the mean of a secure sum as an update that stands for each of those in it.

    So every merge handles them: as that many equal updates.

    Args:
        total: the sum of integers, without masks.
        count: number of updates in the sum.
        clip: the bound on their changes that the integers represent.
        shapes: shapes of the tensors of each of them, without masks.
        sent: the weights that were sent to their devices.

    Returns:
        A safetensors blob of float32 weights, in the form in which the store keeps updates. Their
        mean change has at most the norm `clip`.
    """
    # Devices concatenate their tensors in the order of the names.
    names = sorted(shapes)
    ends = np.cumsum([math.prod(shapes[name]) for name in names])
    mean = restored(total, clip) / count
    norm = np.linalg.norm(mean)
    # No member may send more than the bound, so a mean beyond it contains a cheater's numbers:
    # nobody can find out whose, but scaled down they move the model no further than an honest sum.
    if norm > clip * _ROUNDED:
        mean *= clip / norm
    changes = np.split(mean, ends[:-1])
    weights = {}
    for name, change in zip(names, changes, strict=True):
        weights[name] = (sent[name] + change.reshape(shapes[name])).astype(np.float32)
    return encode_weights(weights)
