"""Reads and writes rows of a history as Parquet files, with a column for each field of a row."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import parquet

from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import DataError
from simulation.results.rounds import DeviceRow, RoundRow

RowT = TypeVar("RowT", "RoundRow", "DeviceRow")


_TYPES: Mapping[Any, Any] = MappingProxyType(
    {
        int: pa.int64(),
        float: pa.float64(),
        float | None: pa.float64(),
        str: pa.string(),
        Mapping[str, int]: pa.map_(pa.string(), pa.int64()),
        Mapping[str, float] | None: pa.map_(pa.string(), pa.float64()),
    }
)
"""Column types by annotation."""


def _schema(kind: type[RowT]) -> Any:
    return pa.schema([(field.name, _TYPES[field.type]) for field in fields(kind)])


def write_rows(path: Path, kind: type[RowT], rows: Sequence[RowT]) -> None:
    """Replace the file with rows of one kind.

    Raises:
        StorageError: the file cannot be written.
    """
    columns = {field.name: _column(field.name, rows) for field in fields(kind)}
    buffer = io.BytesIO()
    parquet.write_table(pa.table(columns, schema=_schema(kind)), buffer)
    write_atomically(path, buffer.getbuffer())


def _column(name: str, rows: Sequence[RowT]) -> list[Any]:
    values = []
    for row in rows:
        value = getattr(row, name)
        # pyarrow takes a map as pairs.
        values.append(tuple(value.items()) if isinstance(value, Mapping) else value)
    return values


def read_rows(path: Path, kind: type[RowT]) -> list[RowT]:
    """Read the rows of a file; columns that an older file lacks have their defaults.

    Raises:
        DataError: the file is damaged, or has other columns.
    """
    try:
        # ParquetFile and not read_table, which looks for partitions in the names of folders.
        with parquet.ParquetFile(path) as file:
            table = file.read()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"cannot read {path}: {error}; remove it, or use another folder") from error
    # Newer columns have defaults for older files.
    for field in fields(kind):
        if field.default is not MISSING and field.name not in table.column_names:
            column_type = _TYPES[field.type]
            defaults = pa.array([field.default] * len(table), column_type)
            table = table.append_column(pa.field(field.name, column_type), defaults)
    if sorted(table.column_names) == sorted(_schema(kind).names):
        table = table.select(_schema(kind).names)
    if table.schema != _schema(kind):
        raise DataError(
            f"{path} was written by another version of Shoal: its columns are {table.schema.names}"
        )
    return [kind(**record) for record in table.to_pylist(maps_as_pydicts="strict")]
