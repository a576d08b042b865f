"""Conditions under which a board may train, set by its operator and checked by measurement.

A condition that has failed holds again only after its reading passes a second limit for some time,
so that a board near the limit does not alternate.
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
            "the board pauses at the first number and continues at the second, which must "
            f"be {word}"
        )
    return limits


def _window(window: str) -> str:
    first, _, last = window.partition("-")
    if not _WINDOW.fullmatch(window) or first == last:
        raise ValueError('write two different times of 24 hours, as in "22:00-06:30"')
    return window


Share = Annotated[float, Field(ge=0, le=1)]
Celsius = Annotated[float, Field(ge=-40, le=150)]
# A limit at which to pause and one at which to continue: the second is smaller, or larger.
_FALLING = AfterValidator(partial(_ordered, True))
_RISING = AfterValidator(partial(_ordered, False))
FallingShares = Annotated[tuple[Share, Share], _FALLING]
RisingShares = Annotated[tuple[Share, Share], _RISING]
FallingCelsius = Annotated[tuple[Celsius, Celsius], _FALLING]
Window = Annotated[str, AfterValidator(_window)]


class ConditionsConfig(FrozenModel):
    """When this board may train; a condition without a value is not checked.

    If a condition fails, the board gives its task back.

    Attributes:
        mains: train only while no battery is discharging.
        battery: two fractions of the battery's full charge, such as `[0.3, 0.5]`: the board pauses
            below the first, and continues at the second.
        celsius: two temperatures in degrees Celsius, such as `[80, 70]`: the board pauses above the
            first, and continues at the second.
        unthrottled: train only while neither heat nor low voltage slows the processor down.
        load: two shares of all processors, such as `[0.5, 0.3]`: the board pauses if other programs
            use more than the first, and continues at the second.
        memory_pressure: two shares of the last minute, such as `[0.2, 0.1]`: the board pauses if a
            process waited for memory for more than the first share, and continues at the second.
        cpu_pressure: two shares of the last minute: the board pauses if a process waited for the
            processor for more than the first share, and continues at the second. This includes the
            agent's own work.
        io_pressure: two shares of the last minute: the board pauses if a process waited for disks
            for more than the first share, and continues at the second.
        new_data: train only if the board has at least this many more samples than at its last
            finished task.
        quiet_hours: times of day at which the board does not train, in its time zone, such as
            `["22:00-06:30"]`.
        metered: network interfaces whose traffic costs money, such as `["wwan*"]`: the board pauses
            while a default route uses one of them.
        look_seconds: seconds between two checks of the conditions.
        settle_seconds: seconds for which a failed condition must be met again before the board
            continues.
        root: folder that contains `sys` and `proc`; in a container, the host's folders may be
            mounted elsewhere.
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
        """Return where the kernel lists devices by class."""
        return self.root / "sys" / "class"


class CheckCounters:
    """Counters that are compared between checks: processor time, and samples.

    Attributes:
        fresh: samples that no finished task has used; None if nobody counts them.
        last: busy, total and this process's time in clock ticks; at first those since the system
            started.
    """

    def __init__(self) -> None:
        self.last = (0.0, 0.0, 0.0)
        self.fresh: int | None = None

    def load(self, root: Path) -> float | None:
        """Return the share of all processors that other programs used since the previous check.

        `root` contains ``proc``, see proc(5).
        """
        text = read_text(root / "proc" / "stat")
        if text is None:
            return None
        # user, nice, system, idle, iowait, irq, softirq and steal; user includes guest time
        fields = [int(field) for field in text.partition("\n")[0].split()[1:9]]
        idle = sum(fields[3:5])  # idle and iowait; all other time is busy
        own = time.process_time() * os.sysconf("SC_CLK_TCK")
        now = (float(sum(fields) - idle), float(sum(fields)), own)
        # Differences, because the kernel counts from the start of the system.
        busy, whole, mine = (now[i] - self.last[i] for i in range(3))
        self.last = now
        # Two checks within one tick have no share.
        if whole <= 0:
            return None
        # The counters are read one after the other, so their difference may be slightly out of
        # range.
        return min(1.0, max(0.0, busy - mine) / whole)


@dataclass(frozen=True)
class ConditionCheck:
    """The input of a check.

    Attributes:
        rules: the operator's conditions.
        ticks: the counters.
        paused: whether the board pauses for this condition now.
    """

    rules: ConditionsConfig
    ticks: CheckCounters
    paused: bool


@dataclass(frozen=True)
class Reading:
    """The result of checking a condition.

    Attributes:
        text: its reading; empty if the board does not report it, and then the condition holds.
        reason: why it does not hold, and when it will; empty if it holds.
    """

    text: str = ""
    reason: str = ""


# Conditions.


def _state(value: bool | None, bad: str, good: str, until: str) -> Reading:
    """Return a condition that holds or does not; `until` is when it will."""
    if value is None:
        return Reading()
    return Reading(bad, f"{bad}; it continues {until}") if value else Reading(good)


def _limited(
    subject: str,
    form: str,
    value: float | None,
    limits: tuple[float, float] | None,
    paused: bool,
) -> Reading:
    """Return a condition on a number, with a limit at which to pause and another to continue.

    The condition's direction follows from which limit is larger.
    """
    if value is None or limits is None:
        return Reading()
    pause, resume = limits
    # Two limits, so that a board near one of them does not alternate.
    limit = resume if paused else pause
    rises = pause > resume
    beyond = value > limit if rises else value < limit
    reason = ""
    if beyond:
        # Without the reading: the same reason is reported only once.
        verb = "rose above" if rises else "fell below"
        reason = f"{subject} {verb} {form.format(pause)}; it continues at {form.format(resume)}"
    return Reading(f"{subject}: {form.format(value)}", reason)


def _mains(check: ConditionCheck) -> Reading:
    discharges = on_battery(check.rules.sysfs)
    return _state(discharges, "it runs on its battery", "no battery discharges", "with mains power")


def _battery(check: ConditionCheck) -> Reading:
    return _limited(
        "the battery", "{:.0%}", charge(check.rules.sysfs), check.rules.battery, check.paused
    )


def _celsius(check: ConditionCheck) -> Reading:
    degrees = temperature(check.rules.sysfs)
    return _limited("the temperature", "{:.3g} °C", degrees, check.rules.celsius, check.paused)


def _unthrottled(check: ConditionCheck) -> Reading:
    return _state(
        throttled(check.rules.root / "sys"),
        "its processor is slowed down",
        "full speed",
        "at full speed; check its fan and power supply",
    )


def _load(check: ConditionCheck) -> Reading:
    load = check.ticks.load(check.rules.root)
    return _limited("the load of other programs", "{:.0%}", load, check.rules.load, check.paused)


def _pressure(resource: str, check: ConditionCheck) -> Reading:
    """Return the condition on pressure for a resource, as the kernel measures it.

    See Documentation/accounting/psi.rst; a kernel without that reports nothing.
    """
    text = read_text(check.rules.root / "proc" / "pressure" / resource)
    share: float | None = None
    if text is not None:
        share = float(text.partition("avg60=")[2].split()[0]) / 100
    limits = getattr(check.rules, f"{resource}_pressure")
    return _limited(f"the wait for {resource}", "{:.0%}", share, limits, check.paused)


def _new_data(check: ConditionCheck) -> Reading:
    if check.ticks.fresh is None:
        return Reading("counted by the agent")
    waits = check.ticks.fresh < (check.rules.new_data or 0)
    reason = f"it waits for {check.rules.new_data} new samples" if waits else ""
    return Reading(f"{check.ticks.fresh} new samples", reason)


def _quiet_hours(check: ConditionCheck) -> Reading:
    clock = time.strftime("%H:%M")
    # Compared without the zone, shown with it.
    text = time.strftime("%H:%M %Z")
    for window in check.rules.quiet_hours:
        first, _, last = window.partition("-")
        # 22:00-06:30 becomes two parts of a day
        over_midnight = last < first
        if first <= clock < last or (over_midnight and not last <= clock < first):
            return Reading(text, f"quiet hours {window}; it continues at {last}, local time")
    return Reading(text)


def _metered(check: ConditionCheck) -> Reading:
    names = default_interfaces(check.rules.root)
    if names is None:
        return Reading()
    for name in names:
        if any(fnmatch(name, pattern) for pattern in check.rules.metered):
            reason = f"it is on the metered network {name}; it continues on another network"
            return Reading(", ".join(names), reason)
    return Reading(", ".join(names) or "no default route")


CONDITIONS: Mapping[str, Callable[[ConditionCheck], Reading]] = MappingProxyType(
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
"""All conditions, by key in ``[conditions]``."""


class ConditionWatch:
    """Checks the conditions repeatedly, and records why the board pauses.

    Attributes:
        check_at: ``time.monotonic()`` of the next check; infinite without conditions.
        readings: the last results of the conditions that are set.
        ticks: the counters.
    """

    def __init__(self, rules: ConditionsConfig) -> None:
        self._rules = rules
        self.ticks = CheckCounters()
        self._failed: dict[str, tuple[str, float]] = {}  # the last reason, and when it was seen
        self._asked = [key for key in CONDITIONS if getattr(rules, key)]
        self.check_at = 0.0 if self._asked else math.inf
        self.readings: Mapping[str, Reading] = {}

    def check(self, now: float) -> str:
        """Return why the board must not train at a ``time.monotonic()``; empty if it may."""
        self.check_at = now + self._rules.look_seconds if self._asked else math.inf
        readings: dict[str, Reading] = {}
        for key in self._asked:
            check = ConditionCheck(self._rules, self.ticks, paused=key in self._failed)
            readings[key] = CONDITIONS[key](check)
        self.readings = readings
        for key, reading in readings.items():
            if reading.reason:
                # The time of the last failure: a condition must hold without a break to settle.
                self._failed[key] = (reading.reason, now)
            elif self._has_settled(key, now):
                del self._failed[key]
        if not self._failed:
            return ""
        return "paused: " + "; ".join(reason for reason, _seen_at in self._failed.values())

    def _has_settled(self, key: str, now: float) -> bool:
        """Return whether a condition that failed has held for long enough."""
        if key not in self._failed:
            return False
        _reason, seen_at = self._failed[key]
        return now - seen_at >= self._rules.settle_seconds
