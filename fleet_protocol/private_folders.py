"""Creates folders that only their owner may write, because their files are trusted or secret."""

import os
import stat
from pathlib import Path
from shlex import quote

from fleet_protocol.disk import storage_error
from fleet_protocol.errors import StorageError

WRITABLE_BY_OTHERS = 0o022
"""Rights of the group and of everybody to write."""

_PRIVATE = 0o700


def make_private_folder(folder: Path) -> None:
    """Create a folder for its owner only, whatever the umask is.

    If it exists, everybody else loses the right to write. Rights to read stay, because somebody may
    have granted them on purpose.

    Args:
        folder: its parent is created, too, with the usual rights.

    Raises:
        StorageError: it cannot be created; or others may write it, and its rights cannot be
            changed.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=_PRIVATE, exist_ok=True)
        _close_to_others(folder)
    except OSError as error:
        raise storage_error("make", folder, error) from error


def _close_to_others(folder: Path) -> None:
    """Remove the right to write a folder from everybody except its owner."""
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
                f"others can write to the folder {folder}, so its files are not safe: use another"
                f" folder, or run `chmod go-w {quote(str(folder))}` as its owner"
            )
        os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & ~WRITABLE_BY_OTHERS)
    finally:
        os.close(descriptor)
