"""Locks between processes, on a file or a folder.

The system releases a lock when all processes that hold it have ended.
"""

import contextlib
import errno
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
_FILE_IN_FOLDER = ".lock"
"""The file that represents a folder if the file system locks only files open for writing."""
_LOOK_PATIENCE_SECONDS = 0.25
"""Minimal waiting time for a lock: `is_held` holds it for an instant."""


def hold(path: Path) -> int:
    """Lock an existing file or folder, and return a descriptor that holds the lock until it closes.

    NFS locks only files open for writing, which a folder never is. In that case a file in the
    folder is locked instead.

    Raises:
        BlockingIOError: another process holds it.
        OSError: it cannot be opened.
    """
    if path.is_file():
        return _lock(path, os.O_RDWR)
    try:
        return _lock(path, os.O_RDONLY)
    except OSError as error:
        # NFS answers a lock on a folder with EBADF.
        if error.errno != errno.EBADF:
            raise
    return _lock(path / _FILE_IN_FOLDER, os.O_RDWR | os.O_CREAT)


def is_held(path: Path) -> bool | None:
    """Return whether a process holds the lock on a folder or file; None if that is unknown.

    The answer may be out of date immediately.
    """
    if not LOCKS:
        return None
    # Either may hold the lock, depending on the file system.
    places = [path]
    stand_in = path / _FILE_IN_FOLDER
    if stand_in.exists():
        places.append(stand_in)
    try:
        for place in places:
            # A shared lock, so that two programs that look do not see each other.
            os.close(_lock(place, os.O_RDONLY, exclusive=False))
    except BlockingIOError:
        return True
    # A file system without locks answers with another error.
    except OSError:
        return None
    return False


def _lock(path: Path, flags: int, *, exclusive: bool = True) -> int:
    """Open and lock a file or folder, without waiting."""
    descriptor = os.open(path, flags, 0o600)
    try:
        if fcntl is not None:
            kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
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
    """Hold the lock on a folder, or on a file, which is created if it is missing.

    On a system without such locks nothing is held.

    Args:
        path: path of the folder or file.
        busy: meaning of the situation that another process holds the lock.
        seconds: how long to wait for it.
        error: raised if another process still holds it; its message contains `busy`, and on Linux
            the process.

    Raises:
        StorageError: it cannot be created or opened.
    """
    if not LOCKS:
        yield
        return
    # Even without patience, because a program that only looks holds the lock for a moment.
    give_up = time.monotonic() + max(seconds, _LOOK_PATIENCE_SECONDS)
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
    """Return which process holds a lock, for a message; empty if the system does not report it.

    Lines read ``1: FLOCK ADVISORY WRITE <pid> <device>:<inode> 0 EOF``.
    """
    with contextlib.suppress(OSError):
        for line in _LOCKS_FILE.read_text(encoding="ascii").splitlines():
            kind, _, _, process, place = line.split()[1:6]
            if kind == "FLOCK" and place.rpartition(":")[2] == str(path.stat().st_ino):
                return f" (process {process} holds it)"
    return ""
