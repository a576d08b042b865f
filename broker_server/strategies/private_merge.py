"""The sum of bounded updates with Gaussian noise, over a number of devices that is known before
they answer.

DP-FedAvg: Brendan McMahan, Daniel Ramage, Kunal Talwar, Li Zhang: "Learning Differentially Private
Recurrent Language Models", ICLR 2018, https://arxiv.org/abs/1710.06963, algorithm 1, with its fixed
denominator. Here every entry has one of its own, the asked devices whose sub-model holds it:

    theta_new(e) = theta_old(e) + (sum_k change_k(e) + z C n(e)) / asked(e)      n(e) standard normal

The change of a device, bounded to the norm C over all its entries, moves the sums by at most C
whatever is in it, and who was asked says nothing of anybody's samples: one round is a Gaussian
mechanism of multiplier z for every device. Devices that do not answer count as if they had changed
nothing.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from broker_server.strategies.accumulator import (
    Accumulator,
    count,
    coverage,
    fold,
    start,
)
from broker_server.strategies.server_optimizer import OptimizerSettings
from broker_server.strategies.strategy import Contribution, Merge, average_and_step
from fleet_protocol.noise import Draw, gaussian
from models.layout import Layout
from models.slicing import CompiledPlan, Tensors


def private_merge(
    layout: Layout,
    asked: Iterable[tuple[str, CompiledPlan]],
    deviation: float,
    optimizer: OptimizerSettings | None,
    draw: Draw,
) -> Merge[Accumulator]:
    """The merge of one round's bounded changes, not weights, given key and plan of every device
    that was asked.

    The deviation is that of the noise in the sum of an entry, z C above.
    """
    expected = Accumulator(layout, {})
    for key, plan in asked:
        count(expected, key, plan)

    def add(sums: Accumulator, update: Contribution) -> None:
        fold(sums, update.key, update.plan, update.weights)

    def noisy(sums: Accumulator, old: Tensors) -> dict[str, NDArray[np.float32]]:
        sums.spent = True
        for name, total in sums.sums.items():
            devices = coverage(expected, name)
            held = devices > 0
            share = held / np.where(held, devices, 1.0)
            total[...] = old[name] + share * (total + deviation * gaussian(draw, total.shape))
        return sums.sums

    return Merge(lambda: start(layout), add, average_and_step(noisy, optimizer), deltas=True)
