"""Keeps on disk what frozen layers return for a board's samples, so that they run once.

The rows lie in a folder that is named by everything on which their bits depend: graph, frozen
values, runtime and size of a batch. Another name means other rows, so all other folders are then
removed. Within the folder a sample is known by a digest of its content: changed data has no rows.

Two files grow side by side: ``rows`` has one row of numbers after the other, and ``index`` for each
row the digest of its sample and a check of both. A row is written before its entry in the index. So
a process may be killed, or a board may lose its power, between any two writes: a row without an
entry does not exist, half an entry is cut off, and a row that does not have its check is computed
again.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from fleet_protocol.private_folders import make_private_folder

FOLDER = "kept"
_ROWS = "rows"
_INDEX = "index"
_REFUSED = "refused"
_DIGEST_BYTES = 32
_CHECK_BYTES = 16
_ENTRY_BYTES = _DIGEST_BYTES + _CHECK_BYTES


@dataclass(frozen=True)
class SampleUse:
    """How a training uses its samples.

    Attributes:
        batch: samples that are computed at once, except in the last batch of a pass.
        samples: number of training samples.
        again: whether a sample is used more than once.
        is_random: whether a sample changes from use to use.
    """

    batch: int
    samples: int
    again: bool
    is_random: bool


@dataclass(frozen=True)
class KeptOutputs:
    """The rows that a board keeps.

    Attributes:
        folder: folder for them only.
        limit_bytes: most bytes of all files in it.
    """

    folder: Path
    limit_bytes: int

    def open(self, name: str, row_bytes: int, use: "SampleUse") -> "KeptRows | None":
        """Open the rows of a name, and remove those of all others.

        Args:
            name: a digest of everything that determines the rows, except the samples.
            row_bytes: bytes of a row.
            use: how a training uses its samples.

        Returns:
            None where keeping them would not pay: they do not all fit; nothing reads them again in
            this task, and they were others in the task before; reading them took longer than
            computing them. Also None where they cannot be kept: samples change at random, a
            sample's row depended on its batch, or the folder cannot be used.
        """
        # All or nothing: with some rows missing, every batch would be computed anyway.
        if use.is_random or use.samples * (row_bytes + _ENTRY_BYTES) > self.limit_bytes:
            return None
        folder = self.folder / name
        try:
            make_private_folder(self.folder)
            self._remove_others(name)
            was_there = folder.is_dir()
            folder.mkdir(exist_ok=True)
            if (folder / _REFUSED).exists() or not (use.again or was_there):
                return None
            return KeptRows(folder, row_bytes, self.limit_bytes)
        except OSError:
            return None

    def _remove_others(self, name: str) -> None:
        """Remove rows that no task can read, and remains of such rows after a kill."""
        with os.scandir(self.folder) as entries:
            others = [entry.path for entry in entries if entry.name != name]
        for path in others:
            shutil.rmtree(path, ignore_errors=True)


class KeptRows:
    """The rows of one name.

    Args:
        folder: an existing folder for them.
        row_bytes: bytes of a row.
        limit_bytes: most bytes of its files.

    Raises:
        OSError: its files cannot be opened.
    """

    def __init__(self, folder: Path, row_bytes: int, limit_bytes: int) -> None:
        self._folder = folder
        self._row_bytes = row_bytes
        self._most_rows = limit_bytes // (row_bytes + _ENTRY_BYTES)
        self._rows = _open(folder / _ROWS)
        self._index = _open(folder / _INDEX)
        self._places: dict[bytes, int] = {}
        self._checks: dict[bytes, bytes] = {}
        self._count = 0
        for digest, check in self._entries():
            self._places[digest] = self._count
            self._checks[digest] = check
            self._count += 1

    def _entries(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the complete entries of the index, as many as there may be rows."""
        # No more entries than rows that fit, whatever the size of the file.
        index = os.pread(self._index, self._most_rows * _ENTRY_BYTES, 0)
        for start in range(0, len(index) - _ENTRY_BYTES + 1, _ENTRY_BYTES):
            middle = start + _DIGEST_BYTES
            yield index[start:middle], index[middle : start + _ENTRY_BYTES]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._checks)

    def __contains__(self, digest: bytes) -> bool:
        """Return whether the row of a sample is here and not known to be damaged."""
        return digest in self._checks

    def read(self, digest: bytes) -> bytes | None:
        """Return the row of a sample; None if it is not here, or damaged.

        Args:
            digest: digest of the sample's content.
        """
        if digest not in self._checks:
            return None
        row = b""
        with contextlib.suppress(OSError):
            row = os.pread(self._rows, self._row_bytes, self._places[digest] * self._row_bytes)
        if _check_of(digest, row) == self._checks[digest]:
            return row
        # Its place stays: the next `add` writes the row there again.
        del self._checks[digest]
        return None

    def add(self, digest: bytes, row: bytes) -> None:
        """Keep the row of a sample, if there is room for it.

        Args:
            digest: digest of the sample's content.
            row: its numbers.
        """
        place = self._places.get(digest, self._count)
        if place >= self._most_rows:
            return
        check = _check_of(digest, row)
        try:
            # The row first: an entry of the index without its row would be read as damaged.
            _write(self._rows, row, place * self._row_bytes)
            _write(self._index, digest + check, place * _ENTRY_BYTES)
        except OSError:
            # A full disk: the rows that are there stay, and no further ones are written.
            self._most_rows = min(self._most_rows, self._count)
            return
        self._places[digest] = place
        self._checks[digest] = check
        self._count = max(self._count, place + 1)

    def give_up(self) -> None:
        """Remove the rows, and note in the folder that there shall be none."""
        with contextlib.suppress(OSError):
            (self._folder / _REFUSED).touch()
            os.ftruncate(self._index, 0)
            os.ftruncate(self._rows, 0)
        self._places.clear()
        self._checks.clear()
        self._count = 0
        self._most_rows = 0

    def close(self) -> None:
        """Close the files."""
        os.close(self._rows)
        os.close(self._index)


def sample_digest(sample: memoryview) -> bytes:
    """Return the digest by which the row of a sample is found."""
    return blake3(sample).digest()


def _check_of(digest: bytes, row: bytes) -> bytes:
    return blake3(digest + row).digest()[:_CHECK_BYTES]


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)


def _write(descriptor: int, data: bytes, offset: int) -> None:
    """Write all bytes at a place; a partial write of a full disk raises the error of the next."""
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view = view[count:]
        offset += count
