"""Explains errors of the disk, and writes whole buffers to it."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleet_protocol.errors import StorageError


def storage_error(
    action: str,
    path: Path,
    error: OSError,
) -> StorageError:
    """Return the explanation of a failed disk operation, of which `action` is the verb."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(
            f"the disk is full: cannot {action} {path}; free some space, nothing already stored "
            "is lost"
        )
    return StorageError(f"cannot {action} {path}: {error.strerror or error}")


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

    A disk with little room may accept only a part of it before it refuses.
    """
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, at)
        left = left[written:]
        at += written
