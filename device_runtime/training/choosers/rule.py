"""The interface of a rule by which a device chooses its tier.

Each rule is a separate file, which a row of the registry names.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from fleet_protocol.frozen import FrozenModel

SettingsT = TypeVar("SettingsT", bound=FrozenModel)
MemoryT = TypeVar("MemoryT", bound=FrozenModel)

_TIER = re.compile(r"^w(\d+\.\d+)-d(\d+)(?:-(?:head|t(\d+\.\d+)(?:-p\d+)?))?$")


@dataclass(frozen=True)
class Situation:
    """The information from which a device chooses.

    Attributes:
        tiers: ids of the tiers that it may train, at least one.
        steps: training steps of the round.
        bytes_per_second: speed at which it sends; None if it is unknown.
        step_seconds: seconds of a training step of the narrowest tier; None if unknown.
    """

    tiers: tuple[str, ...]
    steps: int
    bytes_per_second: float | None
    step_seconds: float | None


@dataclass(frozen=True)
class Decision:
    """The decision of a rule for a round.

    Attributes:
        tier: one of the tiers of the situation.
        efficiency: the system efficiency that the rule has computed from measured times, in the
            unit of its formula; None if a time is unknown, or the rule needs none.
    """

    tier: str
    efficiency: float | None = None


@dataclass(frozen=True)
class Rule(Generic[SettingsT, MemoryT]):
    """How one rule chooses, and what it remembers from round to round.

    Attributes:
        name: name of the rule in offers.
        settings: schema of its settings in an offer.
        memory: schema of its memory, which must survive a restart.
        choose: chooses one of the tiers of a situation; the memory is None before the first round.
        learn: returns the memory after a round, from its number and its mean training loss over all
            steps; for a round that is already in the memory, the memory is unchanged.
    """

    name: str
    settings: type[SettingsT]
    memory: type[MemoryT]
    choose: Callable[[SettingsT, MemoryT | None, Situation], Decision]
    learn: Callable[[SettingsT, MemoryT | None, int, float], MemoryT]


def width_of(tier: str) -> float:
    """Return the width ratio of a tier id; infinite if the id is malformed."""
    match = _TIER.fullmatch(tier)
    return float(match[1]) if match else math.inf


def depth_of(tier: str) -> float:
    """Return the number of blocks of a tier id; infinite if the id is malformed."""
    match = _TIER.fullmatch(tier)
    return int(match[2]) if match else math.inf


def trained_share_of(tier: str) -> float:
    """Return the share of its blocks that a tier trains: 0 for the head, 1 if its id has none."""
    match = _TIER.fullmatch(tier)
    if match is None or tier.endswith("-head"):
        return 0.0
    return float(match[3]) if match[3] else 1.0


def cost_of(tier: str) -> float:
    """Return the operations of a training step of a tier, relative to those of the whole model.

    Both a forward pass and a gradient grow with the square of the width, and a share of t of the
    blocks has gradients only for these: (1 + 2 t) / 3 (specification 7.4).
    """
    return width_of(tier) ** 2 * (1 + 2 * trained_share_of(tier)) / 3


def within(tier: str, width: float, depth: int | None) -> bool:
    """Return whether a tier is within a board's limits; a depth of None means no limit."""
    return width_of(tier) <= width and (depth is None or depth_of(tier) <= depth)
