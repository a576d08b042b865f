"""When a board may train, as its operator wants it: a table of conditions over what it tells.

A condition that has failed holds again only from a second limit on, and for some time, so that a
board at the edge does not come and go.
"""

import math
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from pydantic import AfterValidator, Field

from device_runtime.board import charge, on_battery, temperature
from device_runtime.system import default_interfaces, read_text, throttled
from fleet_protocol.frozen import FrozenModel

_WINDOW = re.compile(r"([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d")


def _ordered(falling: bool, limits: tuple[float, float]) -> tuple[float, float]:
    if limits[0] == limits[1] or (limits[0] > limits[1]) != falling:
        word = "smaller" if falling else "larger"
        raise ValueError(
            f"the board pauses at the first number and goes on at the second, which must be {word}"
        )
    return limits


def _window(window: str) -> str:
    first, _, last = window.partition("-")
    if not _WINDOW.fullmatch(window) or first == last:
        raise ValueError('write two different times of 24 hours, as in "22:00-06:30"')
    return window


Share = Annotated[float, Field(ge=0, le=1)]
Celsius = Annotated[float, Field(ge=-40, le=150)]
# Limits to pause at and to go on at: the second is the smaller, or the larger.
_FALLING = AfterValidator(partial(_ordered, True))
_RISING = AfterValidator(partial(_ordered, False))
FallingShares = Annotated[tuple[Share, Share], _FALLING]
RisingShares = Annotated[tuple[Share, Share], _RISING]
FallingCelsius = Annotated[tuple[Celsius, Celsius], _FALLING]
Window = Annotated[str, AfterValidator(_window)]


class ConditionsConfig(FrozenModel):
    """When this board may train; what is not named is not asked. A task in hand is given back.

    Attributes:
        mains: only while no battery discharges.
        battery: charge below which it pauses, and from which it goes on, as in `[0.3, 0.5]`.
        celsius: temperature above which it pauses, and at which it goes on, as in `[80, 70]`.
        unthrottled: only while neither heat nor low voltage slows the processor down.
        load: share of all processors that other programs take above which it pauses, and at which
            it goes on, as in `[0.5, 0.3]`.
        memory_pressure: share of the last minute in which something waited for memory above which
            it pauses, and at which it goes on, as in `[0.2, 0.1]`.
        cpu_pressure: the same of the processor; what the agent computes counts.
        io_pressure: the same of disks.
        new_data: only with so many samples more than at the last finished task.
        quiet_hours: when it does not train, in the board's own time, as in `["22:00-06:30"]`.
        metered: interfaces that cost money, as in `["wwan*"]`: it pauses while a default route
            leads over one.
        look_seconds: time between two looks.
        settle_seconds: how long a condition that has failed must hold until the board goes on.
        root: where `sys` and `proc` are; a container may see its host's elsewhere.
    """

    mains: bool = False
    battery: RisingShares | None = None
    celsius: FallingCelsius | None = None
    unthrottled: bool = False
    load: FallingShares | None = None
    memory_pressure: FallingShares | None = None
    cpu_pressure: FallingShares | None = None
    io_pressure: FallingShares | None = None
    new_data: int | None = Field(default=None, ge=1)
    quiet_hours: tuple[Window, ...] = ()
    metered: tuple[str, ...] = ()
    look_seconds: float = Field(default=10.0, gt=0)
    settle_seconds: float = Field(default=30.0, ge=0)
    root: Path = Path("/")

    @property
    def sysfs(self) -> Path:
        """Where the kernel shows devices by class."""
        return self.root / "sys" / "class"


class Ticks:
    """What is counted from one check to the next: the time of all processors, and samples.

    Attributes:
        fresh: samples that no finished task had; None where nobody counts them.
        last: busy, in all, and of this process, in clock ticks; at first those when the system
            started.
    """

    def __init__(self) -> None:
        self.last = (0.0, 0.0, 0.0)
        self.fresh: int | None = None

    def load(self, root: Path) -> float | None:
        """Return the share of all processors that other programs took since the check before.

        `root` has ``proc``, see proc(5).
        """
        text = read_text(root / "proc" / "stat")
        if text is None:
            return None
        # user, nice, system, idle, iowait, irq, softirq and steal; guest time is in user already.
        fields = [int(field) for field in text.partition("\n")[0].split()[1:9]]
        idle = sum(fields[3:5])  # idle and iowait; all other time is busy
        own = time.process_time() * os.sysconf("SC_CLK_TCK")
        now = (float(sum(fields) - idle), float(sum(fields)), own)
        busy, whole, mine = (now[i] - self.last[i] for i in range(3))
        self.last = now
        if whole <= 0:
            return None
        return min(1.0, max(0.0, busy - mine) / whole)


@dataclass(frozen=True)
class Check:
    """What a condition is checked with.

    Attributes:
        rules: of the operator.
        ticks: what is counted.
        paused: whether the board pauses for this condition now.
    """

    rules: ConditionsConfig
    ticks: Ticks
    paused: bool


@dataclass(frozen=True)
class Reading:
    """A condition as of one check.

    Attributes:
        text: its reading, empty where the board does not tell; such a condition holds.
        reason: why it does not hold, with when it will; empty where it does.
    """

    text: str = ""
    reason: str = ""


# Conditions.


def _state(value: bool | None, bad: str, good: str, until: str) -> Reading:
    """Return a condition that holds or does not; `until` says when it will."""
    if value is None:
        return Reading()
    return Reading(bad, f"{bad}; it goes on {until}") if value else Reading(good)


def _limited(
    subject: str,
    form: str,
    value: float | None,
    limits: tuple[float, float] | None,
    paused: bool,
) -> Reading:
    """Return a condition on a number, with a limit to pause at and another to go on at.

    Which is larger says in which direction.
    """
    if value is None or limits is None:
        return Reading()
    pause, resume = limits
    limit = resume if paused else pause
    rises = pause > resume
    beyond = value > limit if rises else value < limit
    reason = ""
    if beyond:
        # Without the reading: what does not change is told once.
        verb = "rose above" if rises else "fell below"
        reason = f"{subject} {verb} {form.format(pause)}; it goes on at {form.format(resume)}"
    return Reading(f"{subject}: {form.format(value)}", reason)


def _mains(check: Check) -> Reading:
    discharges = on_battery(check.rules.sysfs)
    return _state(discharges, "it runs on its battery", "no battery discharges", "with mains power")


def _battery(check: Check) -> Reading:
    return _limited(
        "the battery", "{:.0%}", charge(check.rules.sysfs), check.rules.battery, check.paused
    )


def _celsius(check: Check) -> Reading:
    degrees = temperature(check.rules.sysfs)
    return _limited("the temperature", "{:.3g} °C", degrees, check.rules.celsius, check.paused)


def _unthrottled(check: Check) -> Reading:
    return _state(
        throttled(check.rules.root / "sys"),
        "its processor is slowed down",
        "full speed",
        "at full speed; look at fan and supply",
    )


def _load(check: Check) -> Reading:
    load = check.ticks.load(check.rules.root)
    return _limited("the load of other programs", "{:.0%}", load, check.rules.load, check.paused)


def _pressure(resource: str, check: Check) -> Reading:
    """Return the condition on the wait for a resource, as the kernel accounts for it.

    See Documentation/accounting/psi.rst; a kernel without that tells nothing.
    """
    text = read_text(check.rules.root / "proc" / "pressure" / resource)
    share: float | None = None
    if text is not None:
        share = float(text.partition("avg60=")[2].split()[0]) / 100
    limits = getattr(check.rules, f"{resource}_pressure")
    return _limited(f"the wait for {resource}", "{:.0%}", share, limits, check.paused)


def _new_data(check: Check) -> Reading:
    if check.ticks.fresh is None:
        return Reading("counted by the agent")
    waits = check.ticks.fresh < (check.rules.new_data or 0)
    reason = f"it waits for {check.rules.new_data} new samples" if waits else ""
    return Reading(f"{check.ticks.fresh} new samples", reason)


def _quiet_hours(check: Check) -> Reading:
    clock = time.strftime("%H:%M")
    text = time.strftime("%H:%M %Z")
    for window in check.rules.quiet_hours:
        first, _, last = window.partition("-")
        # 22:00-06:30 is two pieces of a day
        over_midnight = last < first
        if first <= clock < last or (over_midnight and not last <= clock < first):
            return Reading(text, f"quiet hours {window}; it goes on at {last} of its own time")
    return Reading(text)


def _metered(check: Check) -> Reading:
    names = default_interfaces(check.rules.root)
    if names is None:
        return Reading()
    for name in names:
        if any(fnmatch(name, pattern) for pattern in check.rules.metered):
            reason = f"its network is {name}, which costs money; it goes on with another"
            return Reading(", ".join(names), reason)
    return Reading(", ".join(names) or "no default route")


CONDITIONS: Mapping[str, Callable[[Check], Reading]] = MappingProxyType(
    {
        "mains": _mains,
        "battery": _battery,
        "celsius": _celsius,
        "unthrottled": _unthrottled,
        "load": _load,
        "memory_pressure": partial(_pressure, "memory"),
        "cpu_pressure": partial(_pressure, "cpu"),
        "io_pressure": partial(_pressure, "io"),
        "new_data": _new_data,
        "quiet_hours": _quiet_hours,
        "metered": _metered,
    }
)
"""Every condition by its key in ``[conditions]``."""


class Watch:
    """Checks the conditions again and again, and knows why the board pauses.

    Attributes:
        check_at: ``time.monotonic()`` of the next check; never where no condition is asked.
        readings: the conditions that are asked, as of the last check.
        ticks: what they are counted from.
    """

    def __init__(self, rules: ConditionsConfig) -> None:
        self._rules = rules
        self.ticks = Ticks()
        self._failed: dict[str, tuple[str, float]] = {}  # the last reason and when it was seen
        self._asked = [key for key in CONDITIONS if getattr(rules, key)]
        self.check_at = 0.0 if self._asked else math.inf
        self.readings: Mapping[str, Reading] = {}

    def check(self, now: float) -> str:
        """Return why the board shall not train at a ``time.monotonic()``; empty where it may."""
        self.check_at = now + self._rules.look_seconds if self._asked else math.inf
        readings: dict[str, Reading] = {}
        for key in self._asked:
            check = Check(self._rules, self.ticks, paused=key in self._failed)
            readings[key] = CONDITIONS[key](check)
        self.readings = readings
        for key, reading in readings.items():
            if reading.reason:
                self._failed[key] = (reading.reason, now)
            elif self._has_settled(key, now):
                del self._failed[key]
        if not self._failed:
            return ""
        return "paused: " + "; ".join(reason for reason, _seen_at in self._failed.values())

    def _has_settled(self, key: str, now: float) -> bool:
        """Return whether a condition that had failed holds for long enough."""
        if key not in self._failed:
            return False
        _reason, seen_at = self._failed[key]
        return now - seen_at >= self._rules.settle_seconds
