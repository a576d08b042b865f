"""Files that a command writes under a name that a user gives: a device keeps its place."""

import os
import stat
from pathlib import Path

import pytest

from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import StorageError


def identity(path: Path) -> tuple[int, int, int]:
    """What makes a path the same file: its inode, kind and time of change; reading moves atime."""
    status = path.lstat()
    return status.st_ino, status.st_mode, status.st_mtime_ns


@pytest.mark.attack(
    "file",
    "A privileged user names a device file, or a link to one, as the output file",
    "refused with an error that names the file; the device file stays",
    "2026-11-29",
)
@pytest.mark.parametrize("kind", ["device", "link", "stream"])
def test_a_device_is_never_replaced_by_a_file(kind, tmp_path):
    """`shoal backup store /dev/null` had made a file of it, into which all programs then wrote."""
    path = tmp_path / "out"
    if kind == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only root makes devices")
    elif kind == "link":
        path.symlink_to("/dev/null")
    else:
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to("pipe")
    before = identity(path)
    with pytest.raises(StorageError, match="out: it is not a file but a device or stream"):
        write_atomically(path, b"content")
    assert identity(path) == before
    assert [entry.name for entry in tmp_path.glob(".out*")] == []


def test_files_and_links_to_files_are_replaced(tmp_path):
    """As before; of a link the file that it leads to stays."""
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("file")
    for name in ("link", "file", "new"):
        write_atomically(tmp_path / name, b"content")
        assert (tmp_path / name).read_bytes() == b"content"
