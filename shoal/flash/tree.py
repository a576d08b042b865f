"""Files as they will lie on a board, and archives of them that are the same bytes for the same
files.
"""

import gzip
import io
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

_LEVEL = 6


@dataclass(frozen=True)
class Entry:
    """A file on a board, its path from the root without the slash in front.

    Of a link the content says where to.
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
    """A tar archive of entries below a prefix; all belongs to root, nothing has a time.

    Folders have entries of their own if they are asked for, as dpkg needs; without them those of a
    board stay as they are where it is unpacked.
    """
    buffer = io.BytesIO()
    made: set[PurePosixPath] = set()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for entry in sorted(entries, key=lambda each: each.path):
            for parent in reversed(PurePosixPath(entry.path).parents) if folders else ():
                if parent not in made:
                    made.add(parent)
                    folder = tarfile.TarInfo(prefix if str(parent) == "." else f"{prefix}{parent}")
                    folder.type = tarfile.DIRTYPE
                    folder.mode = 0o755
                    archive.addfile(folder)
            info = tarfile.TarInfo(f"{prefix}{entry.path}")
            info.mode = entry.mode
            if entry.link:
                info.type, info.linkname, info.mode = (
                    tarfile.SYMTYPE,
                    entry.data.decode(),
                    0o777,
                )
                archive.addfile(info)
            else:
                info.size = len(entry.data)
                archive.addfile(info, io.BytesIO(entry.data))
    return gzip.compress(buffer.getvalue(), _LEVEL, mtime=0) if compress else buffer.getvalue()
