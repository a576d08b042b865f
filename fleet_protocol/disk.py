"""Explains errors of the disk, and writes whole buffers to it."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleet_protocol.errors import StorageError

_REMEDIES = {
    errno.EEXIST: "; move the file with this name away, or choose another folder",
    errno.ENOTDIR: "; a file has the name of a folder above it: choose another folder",
    errno.EACCES: "; give this user access to it, or choose another folder",
    errno.EROFS: "; choose a folder on a writable file system",
}


def storage_error(
    action: str,
    path: Path,
    error: OSError,
) -> StorageError:
    """Return the explanation of a failed disk operation; `action` is its verb."""
    # A full disk and a full quota have the same remedy.
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(
            f"the disk is full: cannot {action} {path}; free some space, nothing already stored "
            "is lost"
        )
    remedy = _REMEDIES.get(error.errno or 0, "")
    return StorageError(f"cannot {action} {path}: {error.strerror or error}{remedy}")


@contextmanager
def disk_errors(action: str, path: Path) -> Iterator[None]:
    """Explain disk operations that fail inside the block, by :func:`storage_error`."""
    try:
        yield
    except OSError as error:
        raise storage_error(action, path, error) from error


def write_all(
    descriptor: int,
    data: bytes | memoryview,
    at: int,
) -> None:
    """Write a whole buffer at a position of a file.

    A nearly full disk may accept only a part of it before it refuses.
    """
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, at)
        left = left[written:]
        at += written
