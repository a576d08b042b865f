"""Conditions that change from round to round: load and link of every device are Markov chains.

Su et al., 2024, https://arxiv.org/abs/2405.00885; specification 4.6. Within a round nothing
changes. A chain keeps its value with probability ``stay``; otherwise it moves to one of the other
values with equal probability. The conditions of a device depend only on the seed of the run and on
the device's number, so they are the same for all methods of a comparison.
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
        self._rates = [clock.mbps(link) for link in self._dynamics.links]
        # One random stream per device, so that its conditions do not depend on the selection of
        # devices.
        self._traces: list[list[DeviceClock]] = []
        self._draws: list[np.random.Generator] = []
        for index in range(len(self._devices)):
            draws = np.random.default_rng((seed, index))
            self._traces.append([])
            self._draws.append(draws)

    def clock_of(self, index: int, number: int) -> DeviceClock:
        """Return a device's clock in a round, counted from 1."""
        trace = self._traces[index]
        while len(trace) < number:
            before = trace[-1] if trace else None
            trace.append(self._next(index, before))
        return trace[number - 1]

    def _next(self, index: int, before: DeviceClock | None) -> DeviceClock:
        """Return a device's clock in a round from the previous round's; None for the first."""
        # Four numbers per round, used or not, so that loads do not depend on whether links change.
        move_load, new_load, move_link, new_link = self._draws[index].random(4)
        stay = self._dynamics.stay
        loads = self._dynamics.loads
        rates = self._rates
        own = self._devices[index]
        if before is None:
            slowdown = _value_at(loads, new_load)
            rate = _value_at(rates, new_link) if rates else own.mbps
            return replace(own, slowdown=slowdown, mbps=rate)

        slowdown = before.slowdown
        if move_load >= stay:
            slowdown = _another_value(loads, slowdown, new_load)
        rate = before.mbps
        if rates and move_link >= stay:
            rate = _another_value(rates, rate, new_link)
        return replace(own, slowdown=slowdown, mbps=rate)


def _value_at(values: Sequence[Value], share: float) -> Value:
    """Return the value at a relative position in [0, 1) of a sequence."""
    place = int(share * len(values))
    return values[place]


def _another_value(values: Sequence[Value], current: Value, share: float) -> Value:
    """Return a value that differs from the current one, if there is one."""
    candidates = [value for value in values if value != current]
    if not candidates:
        return current
    return _value_at(candidates, share)
