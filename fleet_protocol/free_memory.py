"""How much memory a process may still take: what the system has free, and what its control groups allow."""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def free_bytes(root: Path = Path("/")) -> int:
    """Bytes that are free, at most what a control group allows; 0 where the system says nothing.

    Args:
        root: the folder that has ``proc`` and ``sys`` in it.
    """
    return min([_available(root), *_limits(root)])


def _available(root: Path) -> int:
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _limits(root: Path) -> Iterator[int]:
    """The limits of the control groups that this process is in, of version 2 and 1, and of those above them."""
    groups = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            folder, name = groups, "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = groups / "memory", "memory.limit_in_bytes"
        else:
            continue
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):
            limit = _text(folder / group / name).strip()
            if limit.isdecimal():  # and not "max"
                yield int(limit)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
