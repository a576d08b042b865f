"""Names and files that come from others: what a name may say, and what it may lead to.

A manifest, an archive or a table that somebody else wrote names files. Such a name counts within one folder alone, and
means the same file on every system. `tests/fleet_protocol/test_foreign_files.py` has the table of what is refused.
"""

import os
import stat
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, BinaryIO

from pydantic import AfterValidator

from fleet_protocol.errors import BlobError, visible

NAME_LIMIT = 1024
"""Most bytes of a name in UTF-8."""

DOCUMENT_LIMIT = 64 * 1024 * 1024
"""Most bytes of a document that is read as a whole, such as a manifest."""

_PART_LIMIT = 255  # bytes of one part of a name, as file systems have it
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})  # controls, marks of direction, halves of letters, line ends


def name_problem(name: str) -> str | None:
    """Say why a name is not that of a file within a folder; None where it is.

    Args:
        name: as somebody wrote it, with ``/`` between its parts.
    """
    parts = name.split("/")
    if any(unicodedata.category(letter) in _UNSEEN for letter in name):
        return "it has control characters"
    if "\\" in name:
        return "it has a backslash"
    if name.startswith("/") or name[1:2] == ":":
        return "it is absolute"
    if ".." in parts:
        return "it leads out of its folder"
    if "" in parts or "." in parts:
        return "it has an empty part"
    if unicodedata.normalize("NFC", name) != name:
        return "its letters are not composed (Unicode NFC)"
    longest_part = max(len(part.encode()) for part in parts)
    if len(name.encode()) > NAME_LIMIT or longest_part > _PART_LIMIT:
        return "it is too long"
    return None


def quoted(name: str) -> str:
    """A name for a message: in quotes, visible and short."""
    return f"'{visible(name[:200], lines=False)}'"


def _checked_name(name: str) -> str:
    problem = name_problem(name)
    if problem is not None:
        raise ValueError(f"{quoted(name)} names no file of its folder: {problem}")
    return name


MemberName = Annotated[str, AfterValidator(_checked_name)]
"""A name as `name_problem` allows it, as the type of a field."""


def twins(names: Iterable[str]) -> tuple[str, str] | None:
    """Find two different names that some file systems take for one, which differ in case or composition alone."""
    first_of: dict[str, str] = {}
    for name in names:
        folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
        first = first_of.setdefault(folded, name)
        if first != name:
            return first, name
    return None


def path_within(folder: Path, name: str) -> Path:
    """Find the file that a name means within a folder.

    Links may lie on the way as long as they stay within the folder.

    Returns:
        The file's own path, without links.

    Raises:
        BlobError: the name is refused, nothing is there, it is no regular file, or a link leads out of the folder.
    """
    problem = name_problem(name)
    if problem is not None:
        raise BlobError(f"{folder}: {quoted(name)} names no file of this folder: {problem}")
    path = folder / name
    try:
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
        raise BlobError(f"{path} is not read: it is no regular file")
    return real


def open_regular(path: Path, parent: int | None = None) -> BinaryIO:
    """Open a file for reading, without waiting for a pipe and without following a link in its last part.

    Args:
        path: of the file.
        parent: descriptor of the folder that it is looked for in, by its last part; by default the path says it.

    Raises:
        BlobError: it is no regular file.
        OSError: it cannot be opened.
    """
    flags = os.O_RDONLY
    for name in ("O_NONBLOCK", "O_NOFOLLOW", "O_CLOEXEC", "O_BINARY"):
        flags |= getattr(os, name, 0)
    named = path if parent is None else path.name
    file = os.fdopen(os.open(named, flags, dir_fd=parent), "rb")
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise BlobError(f"{path} is not read: it is no regular file")


def read_within(folder: Path, name: str, limit: int = DOCUMENT_LIMIT) -> bytes:
    """Read the file that a name means within a folder, see `path_within`, up to a limit in bytes.

    Raises:
        BlobError: as of `path_within`; or it is longer, or cannot be read.
    """
    path = path_within(folder, name)
    try:
        with open_regular(path) as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise BlobError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > limit:
        raise BlobError(f"{path} is not read: it has more than {limit:,} bytes")
    return data
