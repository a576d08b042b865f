"""What a rule is by which a device chooses its tier.

One file per rule makes one, one registry row names it.
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
    """What a device knows when it chooses."""

    tiers: tuple[str, ...]  # ids of those it may train, at least one
    steps: int  # training steps of the round
    bytes_per_second: float | None  # of its link, None if it is not known
    step_seconds: float | None  # of a training step of the narrowest, None if it is not known


@dataclass(frozen=True)
class Rule(Generic[SettingsT, MemoryT]):
    """How one rule chooses, and what it remembers from round to round."""

    name: str
    settings: type[SettingsT]
    memory: type[MemoryT]  # schema of what it remembers; it must survive a restart
    # one of the tiers of a situation; the memory is None before the first round
    choose: Callable[[SettingsT, MemoryT | None, Situation], str]
    # the memory after a round, by its number and its mean training loss over all steps; of one that
    # it holds, as it is
    learn: Callable[[SettingsT, MemoryT | None, int, float], MemoryT]


def width_of(tier: str) -> float:
    """The width ratio of a tier by its id; infinite where the id is none."""
    match = _TIER.fullmatch(tier)
    return float(match[1]) if match else math.inf


def depth_of(tier: str) -> float:
    """The number of blocks of a tier by its id; infinite where the id is none."""
    match = _TIER.fullmatch(tier)
    return int(match[2]) if match else math.inf


def within(tier: str, width: float, depth: int | None) -> bool:
    """Whether a tier is within a board's limits; None is none."""
    return width_of(tier) <= width and (depth is None or depth_of(tier) <= depth)
