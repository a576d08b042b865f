"""Finds how many processors this process may use: the quota of its unit, not the board's count."""

import math
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from device_runtime.board import available_cores


def thread_counts(root: Path = Path("/")) -> tuple[int, ...]:
    """Return the thread counts above one to try: two, and all that are allowed.

    Args:
        root: root of the file system, where Linux reports the quota of control groups.
    """
    most = min([available_cores(), *_quotas(root)])
    return tuple(sorted({count for count in (2, most) if 1 < count <= most}))


def _quotas(root: Path) -> Iterator[int]:
    """Yield the processors that the control groups of this process and their parents allow."""
    groups = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):
            if controllers == "":
                words = _text(groups / group / "cpu.max").split()
            elif "cpu" in controllers.split(","):
                folder = groups / "cpu" / group
                words = [_text(folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
            else:
                words = []
            # Without a quota the first field is "max", or below 0.
            numbers = [word.strip() for word in words if re.fullmatch(r"\s*\d+\s*", word)]
            if len(numbers) == 2 and int(numbers[1]) > 0:
                yield max(1, math.ceil(int(numbers[0]) / int(numbers[1])))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
