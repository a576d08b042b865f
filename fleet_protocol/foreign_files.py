"""Checks file names from untrusted sources, and the files that they lead to.

A manifest, an archive or a table from somebody else names files. Such a name is valid only within
one folder, and must mean the same file on every system.
`tests/fleet_protocol/test_foreign_files.py` has the table of refused names.
"""

import errno
import os
import stat
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, BinaryIO

from pydantic import AfterValidator

from fleet_protocol.errors import BlobError, visible

NAME_LIMIT = 1024
"""Greatest length of a name, in bytes of UTF-8."""

DOCUMENT_LIMIT = 64 * 1024 * 1024
"""Greatest size in bytes of a document that is read as a whole, such as a manifest."""

_HAS_FOLDERS = os.open in os.supports_dir_fd and hasattr(os, "O_NOFOLLOW")
# O_PATH needs no right to list the folder.
_FOLDER_FLAGS = 0
for _flag in ("O_PATH", "O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC"):
    _FOLDER_FLAGS |= getattr(os, _flag, 0)
_PART_LIMIT = 255  # most bytes of one part of a name in file systems
# Unicode categories of controls, direction marks, halves of letters, and line ends.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def name_problem(name: str) -> str | None:
    """Return why a name is not valid for a file within a folder; None if it is valid.

    Args:
        name: the name as written, with ``/`` between its parts.
    """
    components = name.split("/")
    if not is_seen(name):
        return "it has control characters"
    if "\\" in name:
        return "it has a backslash"
    if name.startswith("/") or name[1:2] == ":":
        return "it is absolute"
    if ".." in components:
        return "it leads out of its folder"
    if "" in components or "." in components:
        return "it has an empty part"
    if unicodedata.normalize("NFC", name) != name:
        return "its letters are not composed (Unicode NFC)"
    longest = max(len(component.encode()) for component in components)
    if len(name.encode()) > NAME_LIMIT or longest > _PART_LIMIT:
        return "it is too long"
    return None


def is_seen(text: str) -> bool:
    """Return whether all characters of a text are visible.

    Controls, direction marks, halves of letters and line ends are not.
    """
    if text.isascii():  # nearly every name, and a manifest has thousands
        return text.isprintable()
    return not any(unicodedata.category(letter) in _UNSEEN for letter in text)


def quoted(name: str) -> str:
    """Quote a name for messages: visible and short."""
    return f"'{visible(name[:200], lines=False)}'"


def _checked_name(name: str) -> str:
    problem = name_problem(name)
    if problem is not None:
        raise ValueError(f"{quoted(name)} does not name a file of its folder: {problem}")
    return name


MemberName = Annotated[str, AfterValidator(_checked_name)]
"""Type of a field for a name that `name_problem` accepts."""


def _checked_label(name: str) -> str:
    if len(name.encode(errors="replace")) > NAME_LIMIT:
        raise ValueError(f"{quoted(name)} is too long: at most {NAME_LIMIT} bytes are allowed")
    if not is_seen(name):
        raise ValueError(f"{quoted(name)} has control characters")
    return name


Label = Annotated[str, AfterValidator(_checked_label)]
"""A name of something other than a file, such as a tensor: short, without control characters."""


def twins(names: Iterable[str]) -> tuple[str, str] | None:
    """Find two names that differ only in case or composition.

    They are the same on some file systems.
    """
    first_of: dict[str, str] = {}
    for name in names:
        folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
        first = first_of.setdefault(folded, name)
        if first != name:
            return first, name
    return None


def path_within(folder: Path, name: str) -> Path:
    """Find the file that a name means within a folder.

    The path may contain links that stay within the folder.

    Returns:
        The file's own path, without links.

    Raises:
        BlobError: the name is refused, the file is missing or not regular, or a link leads out of
            the folder.
    """
    problem = name_problem(name)
    if problem is not None:
        raise BlobError(f"{folder}: {quoted(name)} does not name a file of this folder: {problem}")
    path = folder / name
    try:
        # Resolved first, because the folder itself may be reached by a link.
        home = folder.resolve(strict=True)
        real = path.resolve(strict=True)
        mode = real.stat().st_mode
    except FileNotFoundError as error:
        raise BlobError(f"{path} is missing") from error
    except (OSError, RuntimeError) as error:  # a RuntimeError for links in a circle
        reason = getattr(error, "strerror", None) or str(error)
        raise BlobError(f"cannot read {path}: {reason}") from error
    if not real.is_relative_to(home):
        raise BlobError(f"{path} is not read: a link leads out of {folder}, to {real}")
    if not stat.S_ISREG(mode):
        raise BlobError(f"{path} is not read: it is not a regular file")
    return real


def open_regular(path: Path, parent: int | None = None) -> BinaryIO:
    """Open a file for reading, without waiting for a pipe or following a link in its last part.

    Args:
        path: path of the file.
        parent: descriptor of the folder in which its last part is opened; by default the folder of
            the path.

    Raises:
        BlobError: it is not a regular file, or its last part is a link.
        OSError: it cannot be opened.
    """
    flags = os.O_RDONLY
    for name in ("O_NONBLOCK", "O_NOFOLLOW", "O_CLOEXEC", "O_BINARY"):
        flags |= getattr(os, name, 0)
    named = path if parent is None else path.name
    try:
        file = os.fdopen(os.open(named, flags, dir_fd=parent), "rb")
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise BlobError(f"{path} is not read: it is a link") from error
        raise
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise BlobError(f"{path} is not read: it is not a regular file")


def open_real(path: Path) -> BinaryIO:
    """Open a file as `open_regular` does, but refuse links in every part of its path.

    A path from `path_within` had none when it was found, but the folders of a set may have been
    replaced since.

    Raises:
        BlobError: the errors of `open_regular`; or a folder of the path is a link.
        OSError: it cannot be opened.
    """
    if not _HAS_FOLDERS:
        if path.resolve() != path:
            raise BlobError(f"{path} is not read: a part of its path is a link")
        return open_regular(path)
    parent = os.open(path.anchor, _FOLDER_FLAGS)
    try:
        for number, folder_name in enumerate(path.parts[1:-1], 2):
            try:
                folder = os.open(folder_name, _FOLDER_FLAGS, dir_fd=parent)
            except OSError as error:
                if error.errno not in {errno.ENOTDIR, errno.ELOOP}:
                    raise
                link = Path(*path.parts[:number])
                raise BlobError(f"{path} is not read: {link} is a link or not a folder") from error
            os.close(parent)
            parent = folder
        return open_regular(path, parent)
    finally:
        os.close(parent)


def file_state(file: BinaryIO) -> tuple[int, ...]:
    """Return numbers that stay the same as long as an open file and its content do."""
    status = os.fstat(file.fileno())
    return (
        status.st_dev,
        status.st_ino,
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_size,
    )


def read_within(
    folder: Path,
    name: str,
    limit: int = DOCUMENT_LIMIT,
) -> bytes:
    """Read the file that a name means within a folder, see `path_within`, up to a limit in bytes.

    Raises:
        BlobError: the errors of `path_within`; or it is longer, or cannot be read.
    """
    return read_regular(path_within(folder, name), limit)


def read_regular(path: Path, limit: int = DOCUMENT_LIMIT) -> bytes:
    """Read a file as `open_regular` opens it, up to a limit in bytes.

    Raises:
        BlobError: it is not a regular file, or is a link; or it is longer, or cannot be read.
    """
    try:
        with open_regular(path) as file:
            # One byte more than allowed shows a file that is too long.
            data = file.read(limit + 1)
    except OSError as error:
        raise BlobError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > limit:
        raise BlobError(f"{path} is not read: it has more than {limit:,} bytes")
    return data
