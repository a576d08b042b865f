"""Locks between processes, on a file or a folder.

The system lets go when all processes that hold one are dead.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from fleet_protocol.disk import storage_error
from fleet_protocol.errors import ConfigError, ShoalError

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

LOCKS = fcntl is not None
_LOOK_SECONDS = 0.05
_LOCKS_FILE = Path("/proc/locks")


def hold(path: Path) -> int:
    """Lock an existing file or folder, and return a descriptor that holds the lock until it closes.

    Raises:
        BlockingIOError: another process holds it.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def held(
    path: Path,
    busy: str,
    *,
    seconds: float = 0.0,
    error: type[ShoalError] = ConfigError,
) -> Iterator[None]:
    """Hold the lock on a folder, or on a file, which is made if it is missing.

    On a system without such locks nothing is held.

    Args:
        path: of the folder or file.
        busy: what it means that another process holds the lock.
        seconds: how long to wait for it.
        error: raised if another process still holds it; its message says `busy`, and on Linux which
            process it is.

    Raises:
        StorageError: it cannot be made or opened.
    """
    if not LOCKS:
        yield
        return
    give_up = time.monotonic() + seconds
    while True:
        try:
            if not path.exists():
                path.touch(0o600)
            descriptor = hold(path)
            break
        except BlockingIOError as taken:
            if time.monotonic() >= give_up:
                raise error(f"{busy}{_holder(path)}") from taken
            threading.Event().wait(_LOOK_SECONDS)
        except OSError as failed:
            raise storage_error("lock", path, failed) from failed
    try:
        yield
    finally:
        os.close(descriptor)


def _holder(path: Path) -> str:
    """Return which process holds a lock, for a message; empty if the system does not say it.

    Lines read ``1: FLOCK ADVISORY WRITE <pid> <device>:<inode> 0 EOF``.
    """
    with contextlib.suppress(OSError):
        for line in _LOCKS_FILE.read_text(encoding="ascii").splitlines():
            kind, _, _, process, place = line.split()[1:6]
            if kind == "FLOCK" and place.rpartition(":")[2] == str(path.stat().st_ino):
                return f" (process {process} holds it)"
    return ""
