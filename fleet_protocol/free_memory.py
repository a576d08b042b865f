"""Measures how much memory a process may still use: free memory, limited by its control groups."""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def free_bytes(root: Path = Path("/")) -> int:
    """Return free bytes, at most what a control group allows; 0 if the system reports nothing.

    Args:
        root: the folder that contains ``proc`` and ``sys``.
    """
    # The tightest limit applies.
    return min([_available(root), *_limits(root)])


def _available(root: Path) -> int:
    meminfo = _text(root / "proc/meminfo")
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def _limits(root: Path) -> Iterator[int]:
    """Yield the limits of this process's control groups, version 2 and 1, and of their parents."""
    groups = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        # Fields may be missing in a damaged line.
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        # Version 2 has one hierarchy, without a list of controllers.
        if controllers == "":
            folder = groups
            name = "memory.max"
        elif "memory" in controllers.split(","):
            folder = groups / "memory"
            name = "memory.limit_in_bytes"
        else:
            continue
        own = PurePosixPath(path.lstrip("/"))
        # A limit of a parent group applies to its children.
        for group in (own, *own.parents):
            limit = _text(folder / group / name).strip()
            if limit.isdecimal():  # and not "max"
                yield int(limit)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
