"""Refuses stores with links, through which a server would write and delete files elsewhere."""

import os
from pathlib import Path

from fleet_protocol.disk import disk_errors
from fleet_protocol.errors import StorageError
from fleet_protocol.foreign_files import quoted

_MOUNTED = frozenset({"view.token", "operator.token"})
"""Secrets that are mounted into a store are links; they are only read."""


def refuse_links(folder: Path) -> None:
    """Check that nothing within the folder of a store is a link; the folder itself may be one.

    Raises:
        StorageError: something is a link, or a folder cannot be read.
    """
    folders = [os.fspath(folder)]
    while folders:
        parent = folders.pop()
        # The kind of an entry comes with its name, so that many blobs cost little.
        with disk_errors("read", Path(parent)), os.scandir(parent) as entries:
            for entry in entries:
                if entry.is_symlink() and entry.name not in _MOUNTED:
                    raise StorageError(
                        f"the store {folder} has a link, {quoted(entry.path)}, which may lead to "
                        "other files: remove it, or move the whole store to another disk"
                    )
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
