"""Locks between processes, on a file or a folder.

The system lets go when all processes that hold one are dead.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from fleet_protocol.blobs import storage_error
from fleet_protocol.errors import ConfigError, ShoalError

try:
    import fcntl
except ImportError:  # Windows: nobody waits for anybody
    fcntl = None  # type: ignore[assignment]

LOCKS = fcntl is not None
_LOOK_SECONDS = 0.05
_LOCKS_FILE = Path("/proc/locks")


def hold(path: Path) -> int:
    """Hold what is there: a descriptor that does so until it is closed.

    Raises:
        OSError: it cannot be opened; a BlockingIOError where another process holds it.
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
    """Hold a folder, or a file, which is made if need be.

    Where the system has no such locks everybody goes on.

    Raises:
        ShoalError: an `error` where another holds it, and does so for so many seconds; `busy` says
            what that means, and the message, where the system tells, who it is. A StorageError
            where it cannot be made or opened.
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
    """Who holds it, as Linux tells.

    Lines read ``1: FLOCK ADVISORY WRITE <pid> <device>:<inode> 0 EOF``.
    """
    with contextlib.suppress(OSError):
        for line in _LOCKS_FILE.read_text(encoding="ascii").splitlines():
            kind, _, _, process, place = line.split()[1:6]
            if kind == "FLOCK" and place.rpartition(":")[2] == str(path.stat().st_ino):
                return f" (process {process} holds it)"
    return ""
