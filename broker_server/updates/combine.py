"""How the updates of a round become one: the method's merge, a sum with noise, or a secure sum.

The merges themselves are with the methods: the mean in `broker_server.strategies.accumulator`,
median and trimmed mean in `broker_server.strategies.robust_merge`, adapters in
`broker_server.strategies.low_rank`, the sum with noise in `broker_server.strategies.private_merge`.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from broker_server.settings.privacy import PrivacyConfig
from broker_server.strategies.optimizer_rules import OptimizerSettings
from broker_server.strategies.private_merge import private_merge
from broker_server.strategies.strategy import Merge
from broker_server.updates.checks import expected_shapes
from broker_server.updates.values import Expected, Tensors
from fleet_protocol.noise import Draw
from fleet_protocol.secure_sum import Words, restored
from fleet_protocol.weights import encode_weights
from models.layout import Layout
from models.slicing import CompiledPlan

_ROUNDED = 1.001  # a norm may be above its bound by what whole numbers round


@dataclass(frozen=True)
class Asked:
    """Who was asked in a round, which a sum with noise is divided by.

    Attributes:
        layout: of the global model.
        plans: key and plan of every device that was asked, answered or not.
    """

    layout: Layout
    plans: Iterable[tuple[str, CompiledPlan]]


def choose_merge(
    method: Merge[Any],
    noise: PrivacyConfig | None,
    asked: Asked,
    optimizer: OptimizerSettings | None,
    draw: Callable[[], Draw],
) -> Merge[Any]:
    """Return what folds the updates of a round: the method's merge, or a sum with noise.

    Args:
        method: the method's merge.
        noise: central noise; None for none.
        asked: who was asked.
        optimizer: of the server.
        draw: opens the source of random bytes.
    """
    if noise is None:
        return method
    deviation = noise.clip * noise.noise_multiplier
    return private_merge(asked.layout, asked.plans, deviation, optimizer, draw())


def mean_of_sum(
    total: Words,
    count: int,
    clip: float,
    expected: Expected,
    sent: Tensors,
) -> bytes:
    """Return the mean of a secure sum as an update that stands for each of those in it.

    So whatever merges updates merges these: as many equal ones as there were.

    Args:
        total: the sum of whole numbers, without masks.
        count: how many updates are in it.
        clip: the bound on their changes that the whole numbers stand for.
        expected: what each of them was to be, but for the masks.
        sent: the weights that their devices were sent.

    Returns:
        A safetensors blob of float32 weights, as the store keeps updates. Their mean change has
        the norm `clip` at most.
    """
    shapes = expected_shapes(expected)
    # Devices put their tensors one behind the other in the order of the names.
    names = sorted(shapes)
    ends = np.cumsum([math.prod(shapes[name]) for name in names])
    mean = restored(total, clip) / count
    norm = np.linalg.norm(mean)
    # No member may send more than the bound, so a mean beyond it has a liar's numbers in it: nobody
    # can tell whose, but they move the model no further than an honest sum may.
    if norm > clip * _ROUNDED:
        mean *= clip / norm
    changes = np.split(mean, ends[:-1])
    weights = {}
    for name, change in zip(names, changes, strict=True):
        weights[name] = (sent[name] + change.reshape(shapes[name])).astype(np.float32)
    return encode_weights(weights)
