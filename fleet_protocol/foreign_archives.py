"""Reads untrusted zip archives within bounds of members, headers, sizes, ratios and memory.

Python's zipfile reads the list of members at once, so its size is checked before it is parsed.
Contents are read piece by piece, and never beyond the sizes in the list.
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
"""Bytes of a member that are in memory at a time."""

_ENTRY = b"PK\x01\x02"  # first bytes of each entry in the list of members
_ENCRYPTED = 0x1
_UNIX = 3  # the system whose file modes the upper half of `external_attr` holds
# zipfile raises all of these for damaged archives.
_BROKEN = (
    BadZipFile,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    zlib.error,
)


class BeyondBoundsError(BlobError):
    """An archive exceeds its bounds."""


@dataclass(frozen=True)
class Bounds:
    """The bounds of an archive.

    Attributes:
        members: most files and folders together.
        unpacked_bytes: most bytes of all members together after unpacking.
        ratio: most unpacked bytes of all members for each byte of the archive.
        header_bytes: most bytes of the list of members for each of `members`, including names.
    """

    members: int = 100_000
    unpacked_bytes: int = 4 * 10**9
    ratio: float = 200.0
    header_bytes: int = 300


class _Listing(io.RawIOBase):
    """An archive's file that refuses to return a list of members beyond the bounds.

    zipfile reads that list in one piece, with the size that the archive claims.
    """

    def __init__(
        self,
        file: BinaryIO,
        source: Path,
        bounds: Bounds,
    ) -> None:
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
        # No more than the file has, whatever the archive claims.
        left = max(0, self._size - self._file.tell())
        wanted = left if size is None or size < 0 else min(size, left)
        # Reads of contents are smaller than a piece; only the list is read at once.
        most = max(PIECE_BYTES, self._bounds.members * self._bounds.header_bytes)
        if wanted > most:
            raise BeyondBoundsError(
                f"{self._source}: its list of members has {wanted:,} bytes; the limit is {most:,}"
            )
        data = self._file.read(wanted)
        # Counted before zipfile makes an object for each entry.
        members = data.count(_ENTRY)
        if members > self._bounds.members:
            raise BeyondBoundsError(
                f"{self._source} has {members:,} members; the limit is {self._bounds.members:,}"
            )
        return data


class Archive:
    """An archive whose list of members is within the bounds; see `open_archive`.

    Attributes:
        members: its files by name, with their sizes in bytes, in the order of the archive.
        comment: the comment at its end.
    """

    def __init__(self, archive: ZipFile, source: Path) -> None:
        self._archive = archive
        self._source = source
        self._files = {info.filename: info for info in archive.infolist() if not info.is_dir()}
        self.members: Mapping[str, int] = MappingProxyType(
            {name: info.file_size for name, info in self._files.items()}
        )
        self.comment = archive.comment

    def pieces(self, name: str) -> Iterator[bytes]:
        """Read a member piece by piece.

        Raises:
            BlobError: the member does not exist, or is damaged.
        """
        info = self._files.get(name)
        if info is None:
            raise BlobError(f"{self._source} has no member {quoted(name)}")
        # The size in the list, which `_check_sizes` has bounded.
        left = info.file_size
        try:
            with self._archive.open(info) as member:
                while piece := member.read(PIECE_BYTES):
                    # zipfile itself stops at the size in the list.
                    left -= len(piece)
                    yield piece
        except _BROKEN as error:
            raise BlobError(f"{quoted(name)} in {self._source} is damaged: {error}") from error
        if left:
            raise BlobError(
                f"{quoted(name)} in {self._source} is cut off: {left:,} bytes are missing"
            )

    def read(self, name: str, limit: int) -> bytes:
        """Read a whole member, up to a limit in bytes; errors are those of `pieces`."""
        # Checked before any piece is read.
        if self.members.get(name, 0) > limit:
            raise BlobError(f"{quoted(name)} in {self._source} has more than {limit:,} bytes")
        return b"".join(self.pieces(name))


@contextlib.contextmanager
def open_archive(path: Path, bounds: Bounds | None = None) -> Iterator[Archive]:
    """Open an untrusted zip archive, and check its list of members before anything is unpacked.

    Raises:
        BeyondBoundsError: it exceeds the bounds.
        BlobError: it is not a zip archive, is damaged, or has a refused member: its name leads out
            of a folder (see `name_problem`) or occurs twice; it is a link, a device or encrypted;
            or its compression is not deflate.
        OSError: it cannot be opened or read.
    """
    allowed = bounds or Bounds()
    with open_regular(path.resolve()) as file:  # the user chose the archive's own name
        size = os.fstat(file.fileno()).st_size
        try:
            # Reads the list of members, and no content.
            archive = ZipFile(_Listing(file, path, allowed))
        except _BROKEN as error:
            raise BlobError(f"{path} is not a complete zip archive: {error}") from error
        with archive:
            _check_names(archive, path)
            _check_sizes(archive, path, size, allowed)
            yield Archive(archive, path)


def check_archive(path: Path, bounds: Bounds | None = None) -> None:
    """Check that `open_archive` accepts an archive before another reader opens it.

    Errors are the same.
    """
    with open_archive(path, bounds):
        pass


def _check_names(archive: ZipFile, source: Path) -> None:
    seen: set[str] = set()
    for info in archive.infolist():
        problem = _member_problem(info)
        if problem is None and info.filename in seen:
            problem = "it occurs twice"
        if problem is not None:
            raise BlobError(
                f"{source} has a member {quoted(info.orig_filename)}, which is refused: {problem}"
            )
        seen.add(info.filename)
    # Names that differ only in case or accents.
    alike = twins(seen)
    if alike is not None:
        first, second = map(quoted, alike)
        raise BlobError(
            f"{source} has members {first} and {second}, which are the same file on some systems"
        )


def _member_problem(info: ZipInfo) -> str | None:
    # zipfile cuts a name at its first NUL, so the original name is checked.
    problem = name_problem(info.orig_filename.removesuffix("/"))
    if problem is not None:
        return problem
    # Other systems store no file mode there.
    mode = info.external_attr >> 16 if info.create_system == _UNIX else 0
    kind = stat.S_IFMT(mode)
    # 0: the archive does not state a mode.
    if kind not in {0, stat.S_IFREG, stat.S_IFDIR}:
        return "it is a link, a device or a pipe"
    if info.is_dir() and info.file_size:
        return "it is a folder with content"
    if info.flag_bits & _ENCRYPTED:
        return "it is encrypted"
    if info.compress_type not in {ZIP_STORED, ZIP_DEFLATED}:
        return f"it uses compression method {info.compress_type}; only 0 and 8 are supported"
    return None


def _check_sizes(
    archive: ZipFile,
    source: Path,
    size: int,
    bounds: Bounds,
) -> None:
    unpacked = sum(info.file_size for info in archive.infolist())
    if unpacked > bounds.unpacked_bytes:
        raise BeyondBoundsError(
            f"{source} unpacks to {unpacked:,} bytes; the limit is {bounds.unpacked_bytes:,}"
        )
    # A small archive that unpacks to much is an attack, or damaged.
    if unpacked > bounds.ratio * size:
        raise BeyondBoundsError(
            f"{source} has {size:,} bytes and unpacks to {unpacked:,}, more than "
            f"{bounds.ratio:g} times as many"
        )
