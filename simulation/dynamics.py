"""Conditions that change from round to round: the load and the link of every device as seeded
Markov chains.

Su et al., 2024, https://arxiv.org/abs/2405.00885; specification 4.6. Within a round nothing
changes. A chain stays where it is with probability ``stay``, else it moves to one of the other
values, each as likely. What a device meets depends on the seed of the run and on the device's
number alone, so all methods of a comparison meet the same.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from simulation.clock import Clock, DeviceClock

Value = TypeVar("Value")


class Conditions:
    """The clock of every device in every round.

    Raises:
        ConfigError: the clock has no such link, or a rate is not positive.
    """

    def __init__(self, clock: Clock, devices: Sequence[DeviceClock], seed: int) -> None:
        self._devices = tuple(devices)
        self._dynamics = clock.config.dynamics
        self._rates = tuple(clock.mbps(link) for link in self._dynamics.links)
        self._traces: list[list[DeviceClock]] = [[] for _ in self._devices]
        self._draws = [np.random.default_rng((seed, index)) for index in range(len(self._devices))]

    def of(self, index: int, number: int) -> DeviceClock:
        """A device's clock in a round, counted from 1."""
        trace = self._traces[index]
        while len(trace) < number:
            trace.append(self._next(index, trace[-1] if trace else None))
        return trace[number - 1]

    def _next(self, index: int, before: DeviceClock | None) -> DeviceClock:
        # Four numbers a round, used or not: whether the links change does not change the loads.
        move_load, new_load, move_link, new_link = self._draws[index].random(4)
        loads = self._dynamics.loads
        own = self._devices[index]
        if before is None:
            rate = _at(self._rates, new_link) if self._rates else own.mbps
            return replace(own, slowdown=_at(loads, new_load), mbps=rate)
        slowdown = before.slowdown
        rate = before.mbps
        if move_load >= self._dynamics.stay:
            slowdown = _another(loads, slowdown, new_load)
        if self._rates and move_link >= self._dynamics.stay:
            rate = _another(self._rates, rate, new_link)
        return replace(own, slowdown=slowdown, mbps=rate)


def _at(values: Sequence[Value], share: float) -> Value:
    return values[int(share * len(values))]


def _another(values: Sequence[Value], now: Value, share: float) -> Value:
    others = [value for value in values if value != now]
    return _at(others, share) if others else now
