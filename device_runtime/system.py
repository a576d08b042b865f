"""The kernel's reports about a running board: whether it is slowed down, and its network."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from device_runtime.board import texts

# Bits of the Raspberry Pi's firmware: low voltage, clock capped, throttled, soft limit. The higher
# bits record the same since boot.
_THROTTLED = 0xF


@dataclass(frozen=True)
class _RouteTable:
    """The layout of one of the kernel's routing tables.

    Attributes:
        file: below ``/proc/net``.
        name: column of the interface.
        metric: column of the metric.
        base: base of the metric's digits.
        everywhere: values of columns that mark a default route.
    """

    file: str
    name: int
    metric: int
    base: int
    everywhere: Mapping[int, str]

    def is_default(self, row: Sequence[str]) -> bool:
        """Return whether a row is a default route over a network."""
        if len(row) <= 9 or row[self.name] == "lo":
            return False
        return all(row[column] == value for column, value in self.everywhere.items())

    def metric_of(self, row: Sequence[str]) -> int:
        """Return the metric of a row."""
        return int(row[self.metric], self.base)


_ROUTES = (
    _RouteTable("route", 0, 6, 10, {1: "00000000", 7: "00000000"}),
    _RouteTable("ipv6_route", 9, 5, 16, {0: "0" * 32, 1: "00"}),
)


def read_text(path: Path) -> str | None:
    """Read a small system file; None if it cannot be read."""
    for _path, text in texts(iter([path])):
        return text
    return None


def throttled(sys: Path) -> bool | None:
    """Return whether the Raspberry Pi's firmware, or a cooling device, slows the processor down."""
    marks: list[int] = []
    for _path, text in texts(sys.glob("devices/platform/soc/soc:firmware/get_throttled")):
        if re.fullmatch(r"(0x)?[0-9a-fA-F]+", text):
            marks.append(int(text, 16) & _THROTTLED)
    for path, kind in texts(sys.glob("class/thermal/cooling_device*/type")):
        # Others are fans, which slow nothing down.
        if "cpufreq" not in kind and kind != "Processor":
            continue
        for _path, text in texts(path.parent.glob("cur_state")):
            if text.isdigit():
                marks.append(int(text))
    return any(marks) if marks else None


def default_interfaces(root: Path) -> list[str] | None:
    """Return the interfaces of the default routes; None if the system does not report them.

    For each address family it is the route with the smallest metric.
    """
    names: set[str] = set()
    tells = False
    for table in _ROUTES:
        text = read_text(root / "proc" / "net" / table.file)
        if text is None:
            continue
        tells = True
        routes = [row for row in map(str.split, text.splitlines()) if table.is_default(row)]
        if routes:
            names.add(min(routes, key=table.metric_of)[table.name])
    return sorted(names) if tells else None
