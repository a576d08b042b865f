"""Zip archives that come from others, read within bounds: members, headers, sizes and ratios, in bounded memory.

The list of members is read as a whole by Python's zipfile, so its size is bounded before it is parsed. Contents are
read piece by piece, and never more of them than the list says.
"""

import contextlib
import io
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from typing_extensions import override

from fleet_protocol.errors import BlobError
from fleet_protocol.foreign_files import name_problem, open_regular, quoted, twins

PIECE_BYTES = 1024 * 1024
"""So much of a member is in memory at a time."""

_ENTRY = b"PK\x01\x02"  # how each entry of the list of members begins
_ENCRYPTED = 0x1
_UNIX = 3  # the system whose file modes the upper half of `external_attr` holds
_BROKEN = (BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError, zlib.error)


class BeyondBoundsError(BlobError):
    """An archive that holds more than it may."""


@dataclass(frozen=True)
class Bounds:
    """What an archive may hold.

    Attributes:
        members: most files and folders.
        unpacked_bytes: most bytes of all members together once they are unpacked.
        ratio: most bytes that all members together unpack to, for each byte of the archive.
        header_bytes: most bytes of the list of members for each of `members`, names among them.
    """

    members: int = 100_000
    unpacked_bytes: int = 4 * 10**9
    ratio: float = 200.0
    header_bytes: int = 300


class _Listing(io.RawIOBase):
    """An archive's file that gives out no list of members beyond the bounds.

    zipfile reads that list in one piece, whatever size the archive claims for it.
    """

    def __init__(self, file: BinaryIO, source: Path, bounds: Bounds) -> None:
        super().__init__()
        self._file = file
        self._source = source
        self._bounds = bounds
        self._size = os.fstat(file.fileno()).st_size

    @override
    def seekable(self) -> bool:
        return True

    @override
    def readable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return self._file.seek(offset, whence)

    @override
    def tell(self) -> int:
        return self._file.tell()

    @override
    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self._size - self._file.tell())
        wanted = left if size is None or size < 0 else min(size, left)
        most = max(PIECE_BYTES, self._bounds.members * self._bounds.header_bytes)
        if wanted > most:
            raise BeyondBoundsError(f"{self._source}: its list of members has {wanted:,} bytes; {most:,} are the most")
        data = self._file.read(wanted)
        members = data.count(_ENTRY)
        if members > self._bounds.members:
            raise BeyondBoundsError(f"{self._source} has {members:,} members; {self._bounds.members:,} are the most")
        return data


class Archive:
    """An archive whose list of members was found to be within the bounds; see `open_archive`.

    Attributes:
        members: its files by name, with their sizes in bytes, in the order of the archive.
        comment: what stands at its end.
    """

    def __init__(self, archive: ZipFile, source: Path) -> None:
        self._archive = archive
        self._source = source
        self._files = {info.filename: info for info in archive.infolist() if not info.is_dir()}
        self.members: Mapping[str, int] = MappingProxyType({name: info.file_size for name, info in self._files.items()})
        self.comment = archive.comment

    def pieces(self, name: str) -> Iterator[bytes]:
        """Read a member piece by piece.

        Raises:
            BlobError: there is none of that name, or it is damaged.
        """
        info = self._files.get(name)
        if info is None:
            raise BlobError(f"{self._source} has no member {quoted(name)}")
        left = info.file_size
        try:
            with self._archive.open(info) as member:
                while piece := member.read(PIECE_BYTES):
                    left -= len(piece)
                    yield piece
        except _BROKEN as error:
            raise BlobError(f"{quoted(name)} in {self._source} is damaged: {error}") from error
        if left:
            raise BlobError(f"{quoted(name)} in {self._source} is cut off: {left:,} bytes are missing")

    def read(self, name: str, limit: int) -> bytes:
        """Read a member as a whole, up to a limit in bytes; errors are those of `pieces`."""
        if self.members.get(name, 0) > limit:
            raise BlobError(f"{quoted(name)} in {self._source} has more than {limit:,} bytes")
        return b"".join(self.pieces(name))


@contextlib.contextmanager
def open_archive(path: Path, bounds: Bounds | None = None) -> Iterator[Archive]:
    """Open a zip archive that somebody else may have made, and look at its list of members before anything is unpacked.

    Raises:
        BeyondBoundsError: it holds more than it may.
        BlobError: it is no zip archive, is damaged, or has a member that is refused: one whose name leads out of a
            folder (see `name_problem`) or is there twice, a link, a device, an encrypted one, or one that is packed in
            another way than deflate.
        OSError: it cannot be opened or read.
    """
    allowed = bounds or Bounds()
    with open_regular(path.resolve()) as file:  # the archive itself is named by its user
        size = os.fstat(file.fileno()).st_size
        try:
            archive = ZipFile(_Listing(file, path, allowed))
        except _BROKEN as error:
            raise BlobError(f"{path} is no whole zip archive: {error}") from error
        with archive:
            _check_names(archive, path)
            _check_sizes(archive, path, size, allowed)
            yield Archive(archive, path)


def check_archive(path: Path, bounds: Bounds | None = None) -> None:
    """See that an archive is one that `open_archive` opens, before another reader is given it; errors are the same."""
    with open_archive(path, bounds):
        pass


def _check_names(archive: ZipFile, source: Path) -> None:
    seen: set[str] = set()
    for info in archive.infolist():
        problem = _member_problem(info)
        if problem is None and info.filename in seen:
            problem = "it is there twice"
        if problem is not None:
            raise BlobError(f"{source} has a member {quoted(info.orig_filename)}, which is refused: {problem}")
        seen.add(info.filename)
    alike = twins(seen)
    if alike is not None:
        first, second = map(quoted, alike)
        raise BlobError(f"{source} has members {first} and {second}, which are one file on some systems")


def _member_problem(info: ZipInfo) -> str | None:
    # zipfile cuts a name at its first NUL, so the name of the archive is asked.
    problem = name_problem(info.orig_filename.removesuffix("/"))
    if problem is not None:
        return problem
    mode = info.external_attr >> 16 if info.create_system == _UNIX else 0
    kind = stat.S_IFMT(mode)
    if kind not in {0, stat.S_IFREG, stat.S_IFDIR}:
        return "it is a link, a device or a pipe"
    if info.is_dir() and info.file_size:
        return "it is a folder with a content"
    if info.flag_bits & _ENCRYPTED:
        return "it is encrypted"
    if info.compress_type not in {ZIP_STORED, ZIP_DEFLATED}:
        return f"it is packed by method {info.compress_type}; 0 and 8 are read"
    return None


def _check_sizes(archive: ZipFile, source: Path, size: int, bounds: Bounds) -> None:
    unpacked = sum(info.file_size for info in archive.infolist())
    if unpacked > bounds.unpacked_bytes:
        raise BeyondBoundsError(f"{source} unpacks to {unpacked:,} bytes; {bounds.unpacked_bytes:,} are the most")
    if unpacked > bounds.ratio * size:
        raise BeyondBoundsError(
            f"{source} has {size:,} bytes and unpacks to {unpacked:,}, more than {bounds.ratio:g} times as many"
        )
