"""The files of a board, and reproducible archives of them."""

import gzip
import io
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

_LEVEL = 6


@dataclass(frozen=True)
class Entry:
    """A file on a board.

    Attributes:
        path: path from the root, without the leading slash.
        data: its content; for a link, the path that it points to.
        mode: its permissions.
        link: whether it is a symbolic link.
    """

    path: str
    data: bytes
    mode: int = 0o644
    link: bool = False


def packed(
    entries: Iterable[Entry],
    *,
    prefix: str = "",
    folders: bool = False,
    compress: bool = True,
) -> bytes:
    """Return a tar archive; equal entries give equal bytes.

    All entries belong to root and have no time.

    Args:
        entries: files and links; the archive sorts them by path.
        prefix: folder with its slash, prepended to each path.
        folders: whether folders have entries, which dpkg needs. Without them, unpacking does not
            change existing folders of a board.
        compress: whether to compress it by gzip.
    """
    buffer = io.BytesIO()
    added: set[PurePosixPath] = set()
    with tarfile.open(
        fileobj=buffer,
        mode="w",
        format=tarfile.GNU_FORMAT,
    ) as archive:
        # Sorted, so that equal entries in any order give equal bytes.
        for entry in sorted(entries, key=lambda entry: entry.path):
            if folders:
                _add_folders(
                    archive,
                    PurePosixPath(entry.path),
                    prefix,
                    added,
                )
            _add_entry(archive, entry, prefix)
    if compress:
        # Without a time, for the same reason.
        return gzip.compress(buffer.getvalue(), _LEVEL, mtime=0)
    return buffer.getvalue()


def _add_folders(
    archive: tarfile.TarFile,
    path: PurePosixPath,
    prefix: str,
    added: set[PurePosixPath],
) -> None:
    """Add the missing parent folders of a path."""
    for folder in reversed(path.parents):
        if folder in added:
            continue
        added.add(folder)
        # dpkg expects an entry for the root itself.
        info = tarfile.TarInfo(prefix if str(folder) == "." else f"{prefix}{folder}")
        info.type = tarfile.DIRTYPE
        info.mode = 0o755
        archive.addfile(info)


def _add_entry(
    archive: tarfile.TarFile,
    entry: Entry,
    prefix: str,
) -> None:
    """Add a file or a link."""
    info = tarfile.TarInfo(f"{prefix}{entry.path}")
    if entry.link:
        info.type = tarfile.SYMTYPE
        info.linkname = entry.data.decode()
        info.mode = 0o777
        archive.addfile(info)
        return
    info.mode = entry.mode
    info.size = len(entry.data)
    archive.addfile(info, io.BytesIO(entry.data))
