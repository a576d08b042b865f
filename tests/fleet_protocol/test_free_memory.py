"""Free memory: what the system has, bounded by the control groups of a container or a unit."""

from pathlib import Path

import pytest

from fleet_protocol.free_memory import free_bytes

GIB = 2**30


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:  9000000 kB\nMemFree:  1 kB\nMemAvailable:    4194304 kB\n"}
UNIT = {"proc/self/cgroup": "0::/system.slice/shoal.service\n"}
GROUPS = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (MEMINFO, 4 * GIB),
        (MEMINFO | UNIT | {f"{GROUPS}/system.slice/shoal.service/memory.max": "max\n"}, 4 * GIB),
        (MEMINFO | UNIT | {f"{GROUPS}/system.slice/shoal.service/memory.max": f"{GIB}\n"}, GIB),
        (MEMINFO | UNIT | {f"{GROUPS}/system.slice/memory.max": f"{2 * GIB}\n"}, 2 * GIB),
        (MEMINFO | {"proc/self/cgroup": "0::/\n", f"{GROUPS}/memory.max": f"{GIB}\n"}, GIB),
        (
            MEMINFO
            | {
                "proc/self/cgroup": "8:pids:/\n4:memory:/a/b\n0::/\n",
                f"{GROUPS}/memory/a/memory.limit_in_bytes": "5",
            },
            5,
        ),
        ({}, 0),
    ],
)
def test_the_least_of_system_and_groups(tmp_path, files, expected):
    """Available memory, or the limit of a unit, of the slice above it, or of a container of either
    version.
    """
    assert free_bytes(system(tmp_path, files)) == expected


def test_this_system_says_something():
    """Where the tests run there is memory."""
    assert free_bytes() > 2**20
