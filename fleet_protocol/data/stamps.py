"""Records the state of data files, and finds files that have changed since.

The state of a file is its size, its two timestamps, its inode and its device: a replaced file has
another inode, and a file that was written in place has other timestamps. If a program sets the
modification time back, the inode's change time still differs. File systems round timestamps (FAT to
two seconds), so for a file that was written shortly before the check, the content is compared as
well.
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

from fleet_protocol.data.files import need, table_rows
from fleet_protocol.data.images import IMAGE_SUFFIXES
from fleet_protocol.data.sources import (
    CsvData,
    DataConfig,
    IdxData,
    ImagesData,
    NpzData,
    PythonData,
)
from fleet_protocol.errors import DataError

YOUNG_SECONDS = 3.0
"""Time after a write in which another write may leave the timestamp unchanged: more than the two
seconds of FAT.
"""

REPLACING = "write new data beside the old and rename it"
"""How to replace data files so that no program reads half of the new and half of the old."""

_READ_BYTES = 2**20
_IMAGE_ENDINGS = tuple(sorted(IMAGE_SUFFIXES))
_SHOWN = 3  # names in a message

FileStamp = tuple[int, ...]
"""Size, time of the last write and of the last change in nanoseconds, inode, device.

Empty if there is no file.
"""


@dataclass(frozen=True)
class Stamps:
    """The state of a source's files at one moment.

    Attributes:
        config: the source's settings.
        labelled: whether the files of labels and targets belong to it.
        files: each file by its path; a folder of images has one digest for all of them.
        young: content digests of files that were written within the preceding `YOUNG_SECONDS`.
    """

    config: DataConfig
    labelled: bool
    files: Mapping[str, FileStamp | str]
    young: Mapping[str, str]

    def changes(self, later: "Stamps") -> tuple[str, ...]:
        """Return the paths of files, or folders of images, that differ in a later state."""
        paths = sorted(self.files.keys() | later.files.keys())
        changed = [path for path in paths if self.files.get(path) != later.files.get(path)]
        rewritten = [
            path for path, digest in sorted(self.young.items()) if _content(path) != digest
        ]
        return tuple(dict.fromkeys([*changed, *rewritten]))

    def current(self) -> "Stamps":
        """Return the current state of the same files."""
        return stamps_of(self.config, labelled=self.labelled)


def stamps_of(config: DataConfig, *, labelled: bool = True) -> Stamps:
    """Record the state of every file of a source: its data, and the files of its functions.

    The paths of the source are absolute.
    """
    files: dict[str, FileStamp | str] = {}
    young: dict[str, str] = {}
    for path in _single_files(config, labelled=labelled):
        files[str(path)] = _stamp(str(path), _status(path), young)
    if isinstance(config, ImagesData) and labelled:
        hasher = blake3()
        for name, status in _images(config):
            hasher.update(
                f"{name}\0{_stamp(name, status, young)}\0".encode(errors="surrogateescape")
            )
        files[str(config.path)] = hasher.hexdigest()
    return Stamps(
        config,
        labelled,
        files,
        young,
    )


def list_paths(paths: tuple[str, ...]) -> str:
    """List changed files for a message; of many, only the first."""
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more


def _status(path: Path | os.DirEntry[str]) -> os.stat_result | None:
    """Return the system's status of a file, or of a link's target; None if there is no file."""
    try:
        return path.stat()
    except (OSError, ValueError):  # a name with a NUL names no file
        return None


def _stamp(
    path: str,
    status: os.stat_result | None,
    young: dict[str, str],
) -> FileStamp:
    """Return the stamp of a file; for a young file, add its content digest to `young`."""
    if status is None:
        return ()
    if not stat.S_ISREG(status.st_mode):
        # A folder's size means nothing, and its times also reflect files that do not belong to the
        # data. Reading a pipe would not end.
        return (status.st_ino, status.st_dev)
    newest = max(status.st_mtime_ns, status.st_ctime_ns)
    if newest > time.time_ns() - int(YOUNG_SECONDS * 1e9):
        young[path] = _content(path)
    return (
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_ino,
        status.st_dev,
    )


def _content(path: str) -> str:
    """Return a digest of a file's content; empty if it cannot be read."""
    hasher = blake3()
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            while piece := file.read(_READ_BYTES):
                hasher.update(piece)
    except OSError:
        return ""
    return hasher.hexdigest()


def _single_files(config: DataConfig, *, labelled: bool) -> Iterator[Path]:
    """Return the files that a source names."""
    for name in (*config.transforms, *config.augment):
        if ":" in name:
            yield _function_file(name)
    match config:
        case NpzData(path=path, y_path=labels):
            yield path
            if labels is not None and labelled:
                yield labels
        case CsvData(path=path):
            yield path
        case IdxData(path=path, labels=labels):
            yield from (path, labels)
        case ImagesData(path=path) if not labelled:
            yield path
        case ImagesData(targets=table) if table is not None:
            yield table
        case PythonData(entry_point=name, options=options):
            yield _function_file(name)
            yield from _named_files(_function_file(name).parent, options.values())


def _function_file(name: str) -> Path:
    return Path(name.rpartition(":")[0])


def _named_files(folder: Path, options: Any) -> Iterator[Path]:
    """Return options of a function that name files in its own folder."""
    for value in options:
        if isinstance(value, str) and value and "\0" not in value and (folder / value).is_file():
            yield folder / value


def _images(config: ImagesData) -> Iterator[tuple[str, os.stat_result | None]]:
    """Yield the images of a folder and those below, or of a table, each with its file status."""
    if config.targets is not None:
        with contextlib.suppress(DataError):  # the reader reports errors of the table
            need(config.targets)
            for _, row in table_rows(config.targets, config.bounds):
                yield str(config.path / row[0]), _status(config.path / row[0])
        return
    visited: set[tuple[int, int]] = set()
    waiting = [str(config.path)]
    while waiting:
        folder = waiting.pop()
        status = _status(Path(folder))
        yield folder, status  # also if the folder is missing
        if (
            status is None or (status.st_dev, status.st_ino) in visited
        ):  # a link that leads back to a parent
            continue
        visited.add((status.st_dev, status.st_ino))
        for entry in _entries(folder):
            if entry.is_dir():
                waiting.append(entry.path)
            elif entry.name.lower().endswith(_IMAGE_ENDINGS):
                yield entry.path, _status(entry)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """Return a folder's entries, by name; nothing if it is not a readable folder."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []
