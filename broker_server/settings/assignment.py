"""Complexity levels, and how they are assigned to devices.

Levels and the two ways of assigning them are those of HeteroFL (Diao, Ding, Tarokh: "HeteroFL:
Computation and Communication Efficient Federated Learning for Heterogeneous Clients", ICLR 2021;
specification 1.1). FedRolex (Alam, Liu, Yan, Zhang, NeurIPS 2022) uses the same levels with another
convention for its learning rate (specification 2.6).

A mix of levels is written ``a2-b8``: integer weights, of which the first level is the global
model's. A weight may be 0, so that ``a0-b99`` has a global model wider than any device
(specification 2.8).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from fleet_protocol.errors import ConfigError

LEVEL_RATES: Mapping[str, float] = MappingProxyType(
    {"a": 1.0, "b": 0.5, "c": 0.25, "d": 0.125, "e": 0.0625}
)
"""Width of each level relative to level a (specification 1.1)."""

_TERM = re.compile(r"(?P<level>[a-z]+)(?P<weight>\d+)", re.ASCII)
_LEVELS = 2  # separates the random streams of one round


@dataclass(frozen=True)
class Level:
    """One level of a mix."""

    name: str  # its letter
    rate: float  # width relative to level a, in (0, 1]
    weight: int  # integer weight of the level


@dataclass(frozen=True)
class LevelMix:
    """Levels with their weights, the global model's first."""

    levels: tuple[Level, ...]  # at least one; none is wider than the first

    @property
    def total(self) -> int:
        """Return the sum of the weights, at least 1."""
        return sum(level.weight for level in self.levels)

    def width(self, rate: float) -> float:
        """Return the width share s of a rate, relative to the GLOBAL model."""
        return rate / self.levels[0].rate


def parse_mix(text: str) -> LevelMix:
    """Read a mix of levels such as ``a2-b8``, in the order written.

    Raises:
        ConfigError: the text is malformed, names an unknown or repeated level or a level wider than
            the first one, or has no positive weight.
    """
    levels = [_parse_level(term, text) for term in text.split("-")]
    names = {level.name for level in levels}
    if len(names) < len(levels):
        raise ConfigError(f"{text!r} names a level twice; add their weights")
    for level in levels:
        if level.rate > levels[0].rate:
            raise ConfigError(
                f"{text!r}: level {level.name} is wider than the global model, which is the first"
                " level; put it first"
            )
    mix = LevelMix(tuple(levels))
    if mix.total == 0:
        raise ConfigError(f"{text!r} gives every level the weight 0")
    return mix


def _parse_level(term: str, text: str) -> Level:
    match = _TERM.fullmatch(term)
    if match is None:
        raise ConfigError(
            f"{text!r} is not a mix of levels; expected a form like a2-b8, with integer weights"
        )
    name = match["level"]
    if name not in LEVEL_RATES:
        levels = ", ".join(LEVEL_RATES)
        raise ConfigError(f"{text!r}: level {name!r} does not exist; the levels are {levels}")
    return Level(name, LEVEL_RATES[name], int(match["weight"]))


def assign_fix(mix: LevelMix, devices: int) -> tuple[float, ...]:
    """Assign levels once for the whole run: the first devices get the first level, and so on.

    Args:
        mix: the levels.
        devices: number of devices.

    Returns:
        The rate of each device. ``floor(devices / total)`` devices count for a weight of 1; devices
        left over at the end get the last level (specification 1.1).
    """
    unit = devices // mix.total
    rates: list[float] = []
    for level in mix.levels:
        rates += [level.rate] * (unit * level.weight)
    last = mix.levels[-1].rate
    rates += [last] * (devices - len(rates))
    return tuple(rates)


def assign_dynamic(
    mix: LevelMix, devices: int, *, seed: int, round_index: int
) -> tuple[float, ...]:
    """Draw a level for every device, as before every round.

    Args:
        mix: the levels.
        devices: number of devices.
        seed: seed of the run.
        round_index: number of closed rounds, from 0.

    Returns:
        The rate of each device, drawn independently with probability weight / total; a function of
        the arguments.
    """
    generator = np.random.default_rng([seed, round_index, _LEVELS])
    shares = [level.weight / mix.total for level in mix.levels]
    drawn = generator.choice(len(mix.levels), size=devices, p=shares)
    return tuple(mix.levels[int(index)].rate for index in drawn)
