"""Makes folders that only their owner may write, because their files are trusted or secret."""

import os
import stat
from pathlib import Path

from fleet_protocol.disk import storage_error
from fleet_protocol.errors import StorageError

WRITABLE_BY_OTHERS = 0o022
"""Rights of the group and of everybody to write."""

_PRIVATE = 0o700


def make_private_folder(folder: Path) -> None:
    """Make a folder for its owner alone, whatever the umask is.

    If it exists, nobody but its owner keeps the right to write. Rights to read stay, since somebody
    may have wanted them.

    Args:
        folder: its parent is made, too, with the usual rights.

    Raises:
        StorageError: it cannot be made; or others may write it, and its rights cannot be changed.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=_PRIVATE, exist_ok=True)
        _close_to_others(folder)
    except OSError as error:
        raise storage_error("make", folder, error) from error


def _close_to_others(folder: Path) -> None:
    """Take the right to write a folder from everybody but its owner."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not status.st_mode & WRITABLE_BY_OTHERS:
            return
        is_shared = bool(status.st_mode & stat.S_ISVTX)  # such as /tmp
        if is_shared or status.st_uid != os.geteuid():
            raise StorageError(
                f"others may write the folder {folder}, so its files are not safe: take another "
                f"folder, or say `chmod go-w {folder}` as its owner"
            )
        os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & ~WRITABLE_BY_OTHERS)
    finally:
        os.close(descriptor)
