"""Sum bounded updates with Gaussian noise, over a number of devices that is fixed in advance.

DP-FedAvg: Brendan McMahan, Daniel Ramage, Kunal Talwar, Li Zhang: "Learning Differentially Private
Recurrent Language Models", ICLR 2018, https://arxiv.org/abs/1710.06963, algorithm 1, with its fixed
denominator. Here every entry has its own denominator, the asked devices whose sub-model holds it.
With n(e) standard normal:

    theta_new(e) = theta_old(e) + (sum_k change_k(e) + z C n(e)) / asked(e)

The change of a device is bounded to the norm C over all its entries, so it moves the sums by at
most C, whatever is in it. The choice of the asked devices depends on no samples. One round is
therefore a Gaussian mechanism of multiplier z for every device. Devices that do not answer count as
if they had changed nothing.
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
from broker_server.strategies.optimizer_rules import OptimizerSettings
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
    """Return the merge of one round's bounded changes; its contributions are no weights.

    Args:
        layout: the global model.
        asked: key and plan of every device that was asked.
        deviation: standard deviation of the noise in the sum of an entry, z C above.
        optimizer: the server's optimizer, if any.
        draw: the source of the noise.
    """
    # Only the totals of this accumulator are used, so it needs no sums.
    expected = Accumulator(layout, {})
    for key, plan in asked:
        count(expected, key, plan)

    def add(sums: Accumulator, update: Contribution) -> None:
        fold(
            sums,
            update.key,
            update.plan,
            update.weights,
        )

    def add_noise(sums: Accumulator, old: Tensors) -> dict[str, NDArray[np.float32]]:
        sums.spent = True
        for name, total in sums.sums.items():
            devices = coverage(expected, name)
            is_held = devices > 0
            # 1 / asked(e); 0 where no asked device holds an entry, which then keeps its value.
            share = is_held / np.where(is_held, devices, 1.0)
            noise = deviation * gaussian(draw, total.shape)
            total[...] = old[name] + share * (total + noise)
        return sums.sums

    finish = average_and_step(add_noise, optimizer)
    return Merge(
        lambda: start(layout),
        add,
        finish,
        deltas=True,
    )
