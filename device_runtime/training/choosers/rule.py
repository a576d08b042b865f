"""What a rule is by which a device chooses its tier.

Each rule is a file of its own, which a row of the registry names.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from fleet_protocol.frozen import FrozenModel

SettingsT = TypeVar("SettingsT", bound=FrozenModel)
MemoryT = TypeVar("MemoryT", bound=FrozenModel)

_TIER = re.compile(r"^w(\d+\.\d+)-d(\d+)$")


@dataclass(frozen=True)
class Situation:
    """What a device knows when it chooses.

    Attributes:
        tiers: ids of those it may train, at least one.
        steps: training steps of the round.
        bytes_per_second: of its link, None if it is not known.
        step_seconds: of a training step of the narrowest, None if it is not known.
    """

    tiers: tuple[str, ...]
    steps: int
    bytes_per_second: float | None
    step_seconds: float | None


@dataclass(frozen=True)
class Rule(Generic[SettingsT, MemoryT]):
    """How one rule chooses, and what it remembers from round to round.

    Attributes:
        name: as in offers.
        settings: schema of what an offer sets for it.
        memory: schema of what it remembers; it must survive a restart.
        choose: returns one of the tiers of a situation; the memory is None before the first round.
        learn: returns the memory after a round, by its number and its mean training loss over all
            steps; of a round that the memory has, as it is.
    """

    name: str
    settings: type[SettingsT]
    memory: type[MemoryT]
    choose: Callable[[SettingsT, MemoryT | None, Situation], str]
    learn: Callable[[SettingsT, MemoryT | None, int, float], MemoryT]


def width_of(tier: str) -> float:
    """Return the width ratio of a tier by its id; infinite where the id is none."""
    match = _TIER.fullmatch(tier)
    return float(match[1]) if match else math.inf


def depth_of(tier: str) -> float:
    """Return the number of blocks of a tier by its id; infinite where the id is none."""
    match = _TIER.fullmatch(tier)
    return int(match[2]) if match else math.inf


def within(tier: str, width: float, depth: int | None) -> bool:
    """Return whether a tier is within a board's limits; a depth of None is no limit."""
    return width_of(tier) <= width and (depth is None or depth_of(tier) <= depth)
