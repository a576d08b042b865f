"""Opens data files, packed or not, reads them by lines, and reports missing ones."""

import csv
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from fleet_protocol.errors import DataError

_GZIP_MAGIC = b"\x1f\x8b"


def open_file(path: Path) -> IO[bytes]:
    """Open a file, unpacking it if its content says gzip.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        if packed:
            return gzip.GzipFile(path, "rb")  # type: ignore[return-value]
        return path.open("rb")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def table_rows(path: Path, delimiter: str = ",") -> Iterator[tuple[int, list[str]]]:
    """Yield the lines of a table that are not empty, plain or gzipped, each with its number.

    Raises:
        DataError: the file cannot be read, or is damaged.
    """
    try:
        with open_file(path) as raw:
            text = io.TextIOWrapper(
                raw,
                "utf-8-sig",
                errors="replace",
                newline="",
            )
            lines = csv.reader(text, delimiter=delimiter)
            for row in lines:
                if row:
                    yield lines.line_num, row
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise DataError(f"{path} is truncated or damaged: {error}; copy it again") from error


def need(path: Path, *, folder: bool = False) -> None:
    """Check that a file or a folder exists.

    Raises:
        DataError: it does not exist, or access is denied.
    """
    try:
        exists = path.is_dir() if folder else path.is_file()
    except OSError as error:
        raise DataError(
            f"cannot access {path}: {error.strerror}; give the agent's user access to the folders "
            "above it, and use none below /home"
        ) from error
    if exists:
        return
    if folder:
        raise DataError(
            f"the data folder {path} does not exist; expected one folder per label in it"
        )
    raise DataError(f"the data file {path} does not exist, or is a folder")
