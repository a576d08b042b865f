"""Opens data files, packed or not, reads them by lines, and reports missing and damaged ones."""

import csv
import gzip
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fleet_protocol.data.bounds import LONGEST_LINE, ReadBounds
from fleet_protocol.errors import DataError, ShoalError

_GZIP_MAGIC = b"\x1f\x8b"


@contextmanager
def decoding(path: Path, kind: str, remedy: str = "copy it again") -> Iterator[None]:
    """Name the file in whatever error a decoder raises, because a damaged file may cause any.

    Args:
        path: path of the file that is decoded.
        kind: what the file should be, as in ``an image``.
        remedy: what to do about a damaged one.

    Raises:
        DataError: the decoder failed.
    """
    try:
        yield
    # Errors of Shoal name the file already.
    except ShoalError:
        raise
    except Exception as error:
        reason = str(error) or type(error).__name__
        if isinstance(error, OSError) and error.strerror:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        if isinstance(error, MemoryError):
            raise DataError(f"{path} does not fit into memory: {reason}") from error
        raise DataError(
            f"{path} is not {kind}, or is truncated or damaged: {reason}; {remedy}"
        ) from error


def open_file(path: Path) -> IO[bytes]:
    """Open a file, unpacking it if its content says gzip.

    Raises:
        DataError: it cannot be read.
    """
    try:
        # By its content, not by its name.
        with path.open("rb") as file:
            packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        if packed:
            return gzip.GzipFile(path, "rb")  # type: ignore[return-value]
        return path.open("rb")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def table_rows(
    path: Path, bounds: ReadBounds, delimiter: str = ","
) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines of a table that are not empty, plain or gzipped, each with its number.

    Raises:
        DataError: the file cannot be read, is damaged, or exceeds a bound.
    """
    with decoding(path, "a table"), open_file(path) as raw:
        text = io.TextIOWrapper(
            raw,
            "utf-8-sig",
            newline="",
        )
        # Strict, because a quote without an end would otherwise swallow lines.
        lines = csv.reader(_bounded_lines(text, path), delimiter=delimiter, strict=True)
        most_lines = bounds.samples + 1  # with a header
        for row in _unquoted(lines, path):
            # Empty lines count too: a packed file may have any number of them.
            # More lines than samples may have only a header in addition.
            if lines.line_num > most_lines:
                bounds.check(path, "samples", lines.line_num - 1)
            if len(row) > bounds.columns:
                bounds.check(path, "columns", len(row))
            if row:
                yield lines.line_num, row


def _unquoted(lines: Any, path: Path) -> Iterator[list[str]]:
    """Yield the rows of a `csv.reader`.

    Raises:
        DataError: a quotation mark opens a field and does not end it.
    """
    begins = 1
    while True:
        try:
            row = next(lines)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(
                f"line {begins} of {path} is not a row of a table ({error}): a field that begins "
                "with a quotation mark must end with one, and marks inside it are doubled"
            ) from None
        begins = lines.line_num + 1
        yield row


def _bounded_lines(text: io.TextIOWrapper, path: Path) -> Iterator[str]:
    """Yield the lines of a text; a packed file may have one that fills the memory."""
    most = LONGEST_LINE
    while True:
        try:
            # One character more than allowed shows a longer line without reading it.
            line = text.readline(most + 1)
        except UnicodeDecodeError as error:
            # Replaced characters would give two names one form.
            raise DataError(
                f"{path} is not UTF-8 text: it has the byte 0x{error.object[error.start]:02x}; "
                "save it as UTF-8 (in a spreadsheet program as CSV UTF-8)"
            ) from None
        if not line:
            return
        # The csv module would take it for a letter, and an error would print the whole workbook.
        if "\0" in line:
            raise DataError(
                f"{path} is not a text table: it has a zero byte, as a workbook, a Parquet file or "
                "a damaged file has; save the table as CSV UTF-8"
            )
        if len(line) > most:
            raise DataError(
                f"{path} has a line of more than {most:,} characters, so it is damaged, or "
                "not a table"
            )
        yield line


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
    raise DataError(f"the data file {path} does not exist, or is not a regular file")
