"""What the kernel tells of a board while it runs: whether it is slowed down, and its network."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from device_runtime.board import texts

# Bits of the Raspberry Pi's firmware: low voltage, clock capped, throttled, soft limit. The higher
# ones say the same of the time before.
_THROTTLED = 0xF


@dataclass(frozen=True)
class _RouteTable:
    """Where a table of routes of the kernel has what.

    Attributes:
        file: below ``/proc/net``.
        name: column of the interface.
        metric: column of the metric.
        base: of the metric's digits.
        everywhere: what columns say of a route that leads everywhere.
    """

    file: str
    name: int
    metric: int
    base: int
    everywhere: Mapping[int, str]

    def is_default(self, row: Sequence[str]) -> bool:
        """Return whether a row is a route that leads everywhere, over a network."""
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
    """Read a small file of the system; None where it cannot be read."""
    for _path, text in texts(iter([path])):
        return text
    return None


def throttled(sys: Path) -> bool | None:
    """Return whether the Raspberry Pi's firmware, or what cools the processor, slows it down."""
    marks: list[int] = []
    for _path, text in texts(sys.glob("devices/platform/soc/soc:firmware/get_throttled")):
        if re.fullmatch(r"(0x)?[0-9a-fA-F]+", text):
            marks.append(int(text, 16) & _THROTTLED)
    for path, kind in texts(sys.glob("class/thermal/cooling_device*/type")):
        # Others of these are fans, which slow nothing down.
        if "cpufreq" not in kind and kind != "Processor":
            continue
        for _path, text in texts(path.parent.glob("cur_state")):
            if text.isdigit():
                marks.append(int(text))
    return any(marks) if marks else None


def default_interfaces(root: Path) -> list[str] | None:
    """Return the interfaces of the default routes, None where the board does not tell.

    Of each family it is the route with the smallest metric.
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
