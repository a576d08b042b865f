"""Selects the number of devices of a round and draws them, as a function of the seed."""

import math
import random
from collections.abc import Mapping
from typing import TypeVar

from broker_server.strategies.stage import Stage, stated
from broker_server.strategies.traits import Trait

DeviceT = TypeVar("DeviceT")
"""The caller's value for a device."""

# A round closes when it has the updates that it wants, and drops later ones.
STAGES = stated(
    Stage(
        name="round.over_selection",
        remedy="remove round.over_selection",
        setting="round.over_selection",
        wanted=lambda run: run.round.over_selection > 0,
        breaks=frozenset({Trait.COMPLETE, Trait.LATE_COUNTS}),
    ),
)


def count_wanted(eligible: int, *, fraction: float, least: int) -> int:
    """Return how many updates a round wants: a share of the eligible devices, rounded up.

    It is at least `least` if there are so many devices.
    """
    return min(eligible, max(least, _share_of(fraction, eligible)))


def choose(
    eligible: Mapping[str, DeviceT],
    *,
    wanted: int,
    over_selection: float = 0.0,
    seed: int,
    number: int,
) -> tuple[DeviceT, ...]:
    """Draw the devices of a round without replacement (specification 1.2, step 1).

    The draw is a function of the arguments.

    Args:
        eligible: the eligible devices, by id.
        wanted: number of updates that the round wants.
        over_selection: how many more devices are selected, as a share of the wanted ones, rounded
            up.
        seed: seed of the run.
        number: number of the round.

    Returns:
        The chosen devices, by id.
    """
    count = min(len(eligible), wanted + _share_of(over_selection, wanted))
    # Only from seed and round, so that a killed server draws the same devices again.
    draw = random.Random(f"{seed}/{number}")  # noqa: S311  (a reproducible draw, not a secret)
    # Sorted before the draw: the order in which devices came online must not decide it.
    devices = sorted(draw.sample(sorted(eligible), count))
    return tuple(eligible[device] for device in devices)


def _share_of(share: float, count: int) -> int:
    # Rounded first: 0.07 * 100 is a little more than 7, and must not become 8.
    return math.ceil(round(share * count, 9))
