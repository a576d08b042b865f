"""When a board may train, as its operator wants it: one table of conditions over what the system
tells.

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

from device_runtime.board import charge, on_battery, temperature, texts
from fleet_protocol.frozen import FrozenModel

# of the Raspberry Pi's firmware: low voltage, clock capped, throttled, soft limit; higher bits:
# before
_THROTTLED = 0xF
_WINDOW = re.compile(r"([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d")
# Of IPv4 and IPv6: the table, its columns of interface and metric, the base of the latter, and what
# leads everywhere.
_ROUTES = (
    ("route", 0, 6, 10, {1: "00000000", 7: "00000000"}),
    ("ipv6_route", 9, 5, 16, {0: "0" * 32, 1: "00"}),
)


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


_FALLING = AfterValidator(partial(_ordered, True))
_RISING = AfterValidator(partial(_ordered, False))
Share = Annotated[float, Field(ge=0, le=1)]
Celsius = Annotated[float, Field(ge=-40, le=150)]


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
    battery: Annotated[tuple[Share, Share], _RISING] | None = None
    celsius: Annotated[tuple[Celsius, Celsius], _FALLING] | None = None
    unthrottled: bool = False
    load: Annotated[tuple[Share, Share], _FALLING] | None = None
    memory_pressure: Annotated[tuple[Share, Share], _FALLING] | None = None
    cpu_pressure: Annotated[tuple[Share, Share], _FALLING] | None = None
    io_pressure: Annotated[tuple[Share, Share], _FALLING] | None = None
    new_data: int | None = Field(default=None, ge=1)
    quiet_hours: tuple[Annotated[str, AfterValidator(_window)], ...] = ()
    metered: tuple[str, ...] = ()
    look_seconds: float = Field(default=10.0, gt=0)
    settle_seconds: float = Field(default=30.0, ge=0)
    root: Path = Path("/")

    @property
    def sysfs(self) -> Path:
        """Where the kernel shows devices by class."""
        return self.root / "sys" / "class"


class Ticks:
    """What is counted from one look to the next: the time of all processors, and samples.

    Attributes:
        fresh: samples that no finished task had; None where nobody counts them.
        last: busy, in all, and of this process, in clock ticks; at first those when the system
            started.
    """

    def __init__(self) -> None:
        self.last = (0.0, 0.0, 0.0)
        self.fresh: int | None = None

    def load(self, root: Path) -> float | None:
        """Share of all processors that other programs took since the look before.

        `root` has ``proc``, see proc(5).
        """
        for _, text in texts(iter([root / "proc" / "stat"])):
            fields = [int(field) for field in text.partition("\n")[0].split()[1:9]]
            own = time.process_time() * os.sysconf("SC_CLK_TCK")
            now = (
                float(sum(fields) - sum(fields[3:5])),
                float(sum(fields)),
                own,
            )  # all but idle and iowait is busy
            (busy, whole, mine), self.last = (
                (a - b for a, b in zip(now, self.last, strict=True)),
                now,
            )
            return min(1.0, max(0.0, busy - mine) / whole) if whole > 0 else None
        return None


def _throttled(sys: Path) -> bool | None:
    """By the Raspberry Pi's firmware, or by what cools processors through their clock."""
    firmware = sys.glob("devices/platform/soc/soc:firmware/get_throttled")
    found = [
        int(text, 16) & _THROTTLED
        for _, text in texts(firmware)
        if re.fullmatch(r"(0x)?[0-9a-fA-F]+", text)
    ]
    for path, kind in texts(sys.glob("class/thermal/cooling_device*/type")):
        if "cpufreq" in kind or kind == "Processor":
            found += [
                int(text) for _, text in texts(path.parent.glob("cur_state")) if text.isdigit()
            ]
    return any(found) if found else None


def _interfaces(root: Path) -> list[str] | None:
    """That the default routes lead over, of each family the one with the smallest metric."""
    found: list[str] | None = None
    for table, name, metric, base, everywhere in _ROUTES:
        for _, text in texts(iter([root / "proc" / "net" / table])):
            rows = [
                row
                for row in map(str.split, text.splitlines())
                if len(row) > 9 and row[name] != "lo"
            ]
            routes = [
                r for r in rows if all(r[column] == value for column, value in everywhere.items())
            ]
            found = [
                *(found or []),
                *(row[name] for row in sorted(routes, key=lambda r: int(r[metric], base))[:1]),
            ]
    return None if found is None else sorted(set(found))


@dataclass(frozen=True)
class Seen:
    """A condition at one moment."""

    said: str = ""  # its reading, empty where the board does not tell; such a condition holds
    reason: str = ""  # why it does not hold, with when it will; empty where it does


def _state(value: bool | None, bad: str, good: str, until: str) -> Seen:
    return (
        Seen()
        if value is None
        else Seen(bad, f"{bad}; it goes on {until}")
        if value
        else Seen(good)
    )


def _limited(
    what: str,
    form: str,
    value: float | None,
    limits: tuple[float, float] | None,
    paused: bool,
) -> Seen:
    """A number with a limit to pause at and another to go on at.

    Which is larger says in which direction.
    """
    if value is None or limits is None:
        return Seen()
    (pause, resume), limit = limits, limits[paused]
    beyond, word = (
        (value > limit, "rose above") if pause > resume else (value < limit, "fell below")
    )
    # Without the reading: what does not change is told once.
    reason = f"{what} {word} {form.format(pause)}; it goes on at {form.format(resume)}"
    return Seen(f"{what}: {form.format(value)}", reason if beyond else "")


def _pressure(what: str, rules: ConditionsConfig, _ticks: Ticks, paused: bool) -> Seen:
    """As the kernel accounts for it (Documentation/accounting/psi.rst).

    One without that tells nothing.
    """
    share: float | None = None
    for _, text in texts(iter([rules.root / "proc" / "pressure" / what])):
        share = float(text.partition("avg60=")[2].split()[0]) / 100
    return _limited(
        f"the wait for {what}",
        "{:.0%}",
        share,
        getattr(rules, f"{what}_pressure"),
        paused,
    )


def _hours(rules: ConditionsConfig) -> Seen:
    clock = time.strftime("%H:%M")
    said = time.strftime("%H:%M %Z")
    for window in rules.quiet_hours:
        first, _, last = window.partition("-")
        # 22:00-06:30 is two pieces of a day
        if first <= clock < last or (last < first and not last <= clock < first):
            return Seen(said, f"quiet hours {window}; it goes on at {last} of its own time")
    return Seen(said)


def _link(rules: ConditionsConfig) -> Seen:
    names = _interfaces(rules.root)
    dear = [
        name for name in names or () if any(fnmatch(name, pattern) for pattern in rules.metered)
    ]
    reason = f"its network is {dear[0]}, which costs money; it goes on with another" if dear else ""
    return Seen() if names is None else Seen(", ".join(names) or "no default route", reason)


# fmt: off
CONDITIONS: Mapping[str, Callable[[ConditionsConfig, Ticks, bool], Seen]] = MappingProxyType({
    "mains": lambda rules, _, __: _state(
        on_battery(rules.sysfs), "it runs on its battery", "no battery discharges", "with mains power"),
    "battery": lambda rules, _, paused: _limited(
        "the battery", "{:.0%}", charge(rules.sysfs), rules.battery, paused),
    "celsius": lambda rules, _, paused: _limited(
        "the temperature", "{:.3g} °C", temperature(rules.sysfs), rules.celsius, paused),
    "unthrottled": lambda rules, _, __: _state(
        _throttled(rules.root / "sys"), "its processor is slowed down", "full speed",
        "at full speed; look at fan and supply"),
    "load": lambda rules, ticks, paused: _limited(
        "the load of other programs", "{:.0%}", ticks.load(rules.root), rules.load, paused),
    **{f"{what}_pressure": partial(_pressure, what) for what in ("memory", "cpu", "io")},
    "new_data": lambda rules, ticks, _: Seen("counted by the agent") if ticks.fresh is None else Seen(
        f"{ticks.fresh} new samples",
        f"it waits for {rules.new_data} new samples" if ticks.fresh < (rules.new_data or 0) else ""),
    "quiet_hours": lambda rules, _, __: _hours(rules),
    "metered": lambda rules, _, __: _link(rules),
})
# fmt: on
"""Every condition by its key in ``[conditions]``; told whether the board pauses for it now."""


class Watch:
    """Looks at the conditions again and again, and knows why the board pauses.

    Attributes:
        look_at: ``time.monotonic()`` of the next look; never where no condition is asked.
        seen: the conditions that are asked, as of the last look.
        ticks: what they are counted from.
    """

    def __init__(self, rules: ConditionsConfig) -> None:
        self._rules = rules
        self.ticks = Ticks()
        self._failed: dict[str, tuple[str, float]] = {}  # the last reason and when it was seen
        self._asked = [key for key in CONDITIONS if getattr(rules, key)]
        self.look_at = 0.0 if self._asked else math.inf
        self.seen: Mapping[str, Seen] = {}

    def look(self, now: float) -> str:
        """Why the board shall not train at a ``time.monotonic()``; empty where it may."""
        self.look_at = now + self._rules.look_seconds if self._asked else math.inf
        self.seen = {
            key: CONDITIONS[key](self._rules, self.ticks, key in self._failed)
            for key in self._asked
        }
        for key, seen in self.seen.items():
            if seen.reason:
                self._failed[key] = (seen.reason, now)
            elif key in self._failed and now - self._failed[key][1] >= self._rules.settle_seconds:
                del self._failed[key]
        return (
            "paused: " + "; ".join(reason for reason, _ in self._failed.values())
            if self._failed
            else ""
        )
