"""Files as they will lie on a board, and reproducible archives of them."""

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
        path: from the root, without the slash in front.
        data: its content; of a link the path that it points to.
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
    """Return a tar archive that has the same bytes for the same entries.

    Everything in it belongs to root and has no time.

    Args:
        entries: files and links, which the archive has in the order of their paths.
        prefix: folder, with its slash, that is put before each path.
        folders: whether folders have entries, as dpkg needs. Without them the folders of a board
            stay as they are when the archive is unpacked.
        compress: whether to compress it by gzip.
    """
    buffer = io.BytesIO()
    added: set[PurePosixPath] = set()
    with tarfile.open(
        fileobj=buffer,
        mode="w",
        format=tarfile.GNU_FORMAT,
    ) as archive:
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
        return gzip.compress(buffer.getvalue(), _LEVEL, mtime=0)
    return buffer.getvalue()


def _add_folders(
    archive: tarfile.TarFile,
    path: PurePosixPath,
    prefix: str,
    added: set[PurePosixPath],
) -> None:
    """Add the folders above a path that the archive does not have yet."""
    for folder in reversed(path.parents):
        if folder in added:
            continue
        added.add(folder)
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
