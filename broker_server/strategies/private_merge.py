"""Sums bounded updates with Gaussian noise, over a number of devices that is fixed in advance.

DP-FedAvg: Brendan McMahan, Daniel Ramage, Kunal Talwar, Li Zhang: "Learning Differentially Private
Recurrent Language Models", ICLR 2018, https://arxiv.org/abs/1710.06963, algorithm 1, with its fixed
denominator. Here every entry has a separate denominator, the number of selected devices whose
sub-model contains it. With n(e) standard normal:

    theta_new(e) = theta_old(e) + (sum_k change_k(e) + z C n(e)) / asked(e)

The change of a device is bounded to the norm C over all its entries, so it moves the sums by at
most C, whatever it contains. The selection of devices depends on no samples. One round is therefore
a Gaussian mechanism of multiplier z for every device. Devices that do not answer count as if they
had changed nothing.
"""

from collections.abc import Iterable
from typing import Protocol

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
from broker_server.strategies.stage import Stage, stated
from broker_server.strategies.strategy import Contribution, Merge, average_and_step
from broker_server.strategies.traits import Trait
from fleet_protocol.noise import Draw, gaussian
from models.layout import Layout
from models.slicing import CompiledPlan, Tensors

# The noise covers one device's largest effect on the sum. That effect is bounded only if no device
# changes the weights of others, and if its labels and its choice of a tier reveal nothing.
STAGES = stated(
    Stage(
        name='privacy.where = "central"',
        remedy="remove [privacy]",
        setting="privacy",
        wanted=lambda run: run.privacy is not None and run.privacy.where == "central",
        needs=frozenset(
            {
                Trait.INDEPENDENT,
                Trait.LABELS_HIDDEN,
                Trait.KNOWN_COUNT,
                Trait.ALIKE,
                Trait.MEAN_OF_CHANGES,
                Trait.ASSIGNED_TIERS,
                Trait.NO_STATISTICS,
            }
        ),
    ),
)


class Noise(Protocol):
    """The noise of ``[privacy]``, which `broker_server.settings.privacy` explains."""

    @property
    def clip(self) -> float:
        """Return the largest norm of a change."""

    @property
    def noise_multiplier(self) -> float:
        """Return the standard deviation of the noise, as a multiple of the clip."""


def private_merge(
    layout: Layout,
    asked: Iterable[tuple[str, CompiledPlan]],
    deviation: float,
    optimizer: OptimizerSettings | None,
    draw: Draw,
) -> Merge[Accumulator]:
    """Return the merge of one round's bounded changes; its contributions are not weights.

    Args:
        layout: the global model.
        asked: key and plan of every selected device.
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
            # 1 / asked(e); 0 if no selected device contains an entry, which then keeps its value.
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
