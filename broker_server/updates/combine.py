"""How the updates of a round become one: the method's merge, or a sum with noise.

The merges themselves are with the methods: the mean in `broker_server.strategies.accumulator`,
median and trimmed mean in `broker_server.strategies.robust_merge`, adapters in
`broker_server.strategies.low_rank`, the sum with noise in `broker_server.strategies.private_merge`.
The mean of a secure sum comes in as equal updates (`broker_server.stages.secure_mean`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from broker_server.strategies.optimizer_rules import OptimizerSettings
from broker_server.strategies.private_merge import Noise, private_merge
from broker_server.strategies.strategy import Merge
from fleet_protocol.noise import Draw
from models.layout import Layout
from models.slicing import CompiledPlan


@dataclass(frozen=True)
class SelectedDevices:
    """The selected devices of a round, by whose number a sum with noise is divided.

    Attributes:
        layout: layout of the global model.
        plans: key and plan of every selected device, whether it answered or not.
    """

    layout: Layout
    plans: Iterable[tuple[str, CompiledPlan]]


def choose_merge(
    method: Merge[Any],
    noise: Noise | None,
    asked: SelectedDevices,
    optimizer: OptimizerSettings | None,
    draw: Callable[[], Draw],
) -> Merge[Any]:
    """Return what folds the updates of a round: the method's merge, or a sum with noise.

    Args:
        method: the method's merge.
        noise: central noise; None for none.
        asked: the selected devices.
        optimizer: optimizer of the server.
        draw: opens the source of random bytes.
    """
    if noise is None:
        return method
    # Deviation of the noise on a sum: the largest norm of a change times the multiplier.
    deviation = noise.clip * noise.noise_multiplier
    return private_merge(asked.layout, asked.plans, deviation, optimizer, draw())
