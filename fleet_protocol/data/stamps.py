"""The files that data consists of, and whether any of them has changed since it was looked at.

A file is known by its size, its two times, its inode and its device: one that was replaced has another inode, one that
was written in place has other times, and where a program sets the time back, the time of the last change of the inode
stays. File systems round times (FAT to two seconds), so of a file that was written shortly before it was looked at the
content counts as well.
"""

import contextlib
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from fleet_protocol.data.files import table_rows
from fleet_protocol.data.images import IMAGE_SUFFIXES
from fleet_protocol.data.sources import CsvData, DataConfig, IdxData, ImagesData, NpzData, PythonData
from fleet_protocol.errors import DataError

YOUNG_SECONDS = 3.0
"""A file may be written again so shortly after a write without another time: more than the two seconds of FAT."""

REPLACING = "write new data beside the old and rename it"
"""How files of data are replaced, so that nobody reads half of the new and half of the old."""

_READ_BYTES = 2**20
_IMAGE_ENDINGS = tuple(sorted(IMAGE_SUFFIXES))
_SHOWN = 3  # names in a message

FileStamp = tuple[int, ...]
"""Size, time of the last write and of the last change in nanoseconds, inode, device; empty where there is no file."""


@dataclass(frozen=True)
class Stamps:
    """The files of a source as they were at a moment.

    Attributes:
        config: the source.
        labelled: whether the files of labels and targets belong to it.
        files: each file by its path; a folder of images has one digest for all of them.
        young: digests of the content of files that were written within `YOUNG_SECONDS` before.
    """

    config: DataConfig
    labelled: bool
    files: Mapping[str, FileStamp | str]
    young: Mapping[str, str]

    def changes(self, later: "Stamps") -> tuple[str, ...]:
        """Paths of the files, or folders of images, that another look finds changed."""
        paths = sorted(self.files.keys() | later.files.keys())
        changed = [path for path in paths if self.files.get(path) != later.files.get(path)]
        rewritten = [path for path, digest in sorted(self.young.items()) if _content(path) != digest]
        return tuple(dict.fromkeys([*changed, *rewritten]))

    def again(self) -> "Stamps":
        """The same files as they are now."""
        return stamps_of(self.config, labelled=self.labelled)


def stamps_of(config: DataConfig, *, labelled: bool = True) -> Stamps:
    """Look at every file of a source with absolute paths: its data, and the files of functions that it names."""
    files: dict[str, FileStamp | str] = {}
    young: dict[str, str] = {}
    for path in _single_files(config, labelled=labelled):
        files[str(path)] = _stamp(str(path), _status(path), young)
    if isinstance(config, ImagesData) and labelled:
        hasher = blake3()
        for name, status in _images(config):
            hasher.update(f"{name}\0{_stamp(name, status, young)}\0".encode(errors="surrogateescape"))
        files[str(config.path)] = hasher.hexdigest()
    return Stamps(config, labelled, files, young)


def shown(paths: tuple[str, ...]) -> str:
    """The names of changed files for a message, of many the first."""
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more


def _status(path: Path | os.DirEntry[str]) -> os.stat_result | None:
    """What the system says about a file, or about what a link leads to; None where there is none."""
    try:
        return path.stat()
    except OSError:
        return None


def _stamp(path: str, status: os.stat_result | None, young: dict[str, str]) -> FileStamp:
    """The stamp of a file; where that is young, its content goes into `young`."""
    if status is None:
        return ()
    if stat.S_ISDIR(status.st_mode):
        # The size of a folder says nothing, and its times tell of files that do not belong to the data.
        return (status.st_ino, status.st_dev)
    newest = max(status.st_mtime_ns, status.st_ctime_ns)
    if newest > time.time_ns() - int(YOUNG_SECONDS * 1e9):
        young[path] = _content(path)
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)


def _content(path: str) -> str:
    """A digest of what a file holds; empty where it cannot be read."""
    hasher = blake3()
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - the path is a key, and may be no text
            while piece := file.read(_READ_BYTES):
                hasher.update(piece)
    except OSError:
        return ""
    return hasher.hexdigest()


def _single_files(config: DataConfig, *, labelled: bool) -> Iterator[Path]:
    """The files of a source that have names in it."""
    for name in (*config.transforms, *config.augment):
        if ":" in name:
            yield _of_function(name)
    match config:
        case NpzData(path=path, y_path=labels):
            yield path
            if labels is not None and labelled:
                yield labels
        case CsvData(path=path):
            yield path
        case IdxData(path=path, labels=labels):
            yield from (path, labels)
        case ImagesData(path=path, targets=table):
            if not labelled:
                yield path
            elif table is not None:
                yield table
        case PythonData(entry_point=name, options=options):
            yield _of_function(name)
            yield from _named_files(_of_function(name).parent, options.values())


def _of_function(name: str) -> Path:
    return Path(name.rpartition(":")[0])


def _named_files(folder: Path, options: Any) -> Iterator[Path]:
    """Options of a function that are the names of files, from its own folder."""
    for value in options:
        if isinstance(value, str) and value and "\0" not in value and (folder / value).is_file():
            yield folder / value


def _images(config: ImagesData) -> Iterator[tuple[str, os.stat_result | None]]:
    """The images of a folder and its folders, or those that a table lists, with what the system says about each."""
    if config.targets is not None:
        with contextlib.suppress(DataError):  # the reader says what is wrong with the table
            for _, row in table_rows(config.targets):
                yield str(config.path / row[0]), _status(config.path / row[0])
        return
    visited: set[tuple[int, int]] = set()
    waiting = [str(config.path)]
    while waiting:
        folder = waiting.pop()
        status = _status(Path(folder))
        yield folder, status  # also one that is gone
        if status is None or (status.st_dev, status.st_ino) in visited:  # a link that leads back
            continue
        visited.add((status.st_dev, status.st_ino))
        for entry in _entries(folder):
            if entry.is_dir():
                waiting.append(entry.path)
            elif entry.name.lower().endswith(_IMAGE_ENDINGS):
                yield entry.path, _status(entry)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """What a folder holds, by name; nothing where it may not be read, or is none."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []
