"""The database of a store: transactions, checked reads, and rows that wait for the next commit.

A row whose loss in a crash does no harm (a device's presence, lines of the log, counts) waits in
memory and is written with the next commit, or by `Database.flush` now and then: a commit waits for
the disk, and a fleet sends many messages at once.
"""

import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Executable, Select, func, select
from sqlalchemy.exc import SQLAlchemyError

from broker_server.store import schema
from broker_server.store.opening import database_message, open_for_reading, open_for_writing
from broker_server.store.rows import TABLES, DamagedRowError, damaged_row, from_row, values_of
from fleet_protocol.errors import StorageError
from fleet_protocol.foreign_files import quoted

RecordT = TypeVar("RecordT")

_LOG = logging.getLogger(__name__)
_MALFORMED = "malformed JSON"  # SQLite's wording
_READ_AT_ONCE = 256  # rows, which may be large
_MOST_WAITING = 4096  # rows of one kind; a flood must not fill the memory


class Database:
    """The database that the tables of a store share.

    Args:
        folder: the folder of the store, which is created; it contains ``shoal.db`` and, beside it,
            the blobs.
        read_only: write neither into the folder nor into the database, and refuse to create a
            missing store. A store of an older version is read as if it had been upgraded.
        durable: let a commit wait for the disk; otherwise a power cut may lose the last commits,
            but a killed process loses none.

    Raises:
        StorageError: the folder cannot be used, or was written by a newer version of Shoal.
    """

    def __init__(
        self,
        folder: Path,
        *,
        read_only: bool = False,
        durable: bool = True,
    ) -> None:
        self.folder = folder
        self.path = folder / schema.DATABASE
        self._read_only = read_only
        if read_only:
            self._engine = open_for_reading(self.path)
        else:
            self._engine = open_for_writing(self.path, durable=durable)
        # By statement, the rows that wait for the next commit, by key.
        self._waiting: dict[Executable, dict[Hashable, Mapping[str, Any]]] = {}

    def close(self) -> None:
        """Write the rows that wait, and close every connection.

        Raises:
            StorageError: the rows cannot be written.
        """
        try:
            self.flush()
        finally:
            self._engine.dispose()

    def flush(self) -> None:
        """Commit the rows that wait.

        Raises:
            StorageError: the disk is full or cannot be written.
        """
        if self._waiting:
            with self._begin():
                pass

    def check_rows(self) -> None:
        """Read every row of every table, one after the other.

        Raises:
            DamagedRowError: a row has values that no server can have written.
            StorageError: the database cannot be read.
        """
        with self._transaction() as connection:
            # In batches: a stranger's database may be large.
            batched = connection.execution_options(yield_per=_READ_AT_ONCE)
            for kind, table in TABLES.items():
                for row in batched.execute(select(table)):
                    from_row(kind, row)

    @contextmanager
    def _begin(self) -> Iterator[Connection]:
        """Open a transaction that also writes the waiting rows."""
        with self._transaction() as connection:
            for statement, rows in self._waiting.items():
                connection.execute(statement, list(rows.values()))
            yield connection
        # Only after the commit: if a transaction fails, they keep waiting.
        self._waiting.clear()

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            message = database_message(error)
            if _MALFORMED in message:
                self._raise_malformed()
            raise StorageError(f"cannot use the store {self.path}: {message}") from error

    def _raise_malformed(self) -> None:
        """Raise an error that names the task whose JSON SQLite could not read, if it is found."""
        table = schema.tasks
        with suppress(SQLAlchemyError), self._engine.begin() as connection:
            for column in (table.c.metrics, table.c.screening):
                query = select(table.c.id).where(column.is_not(None), func.json_valid(column) == 0)
                task = connection.execute(query.limit(1)).scalar()
                if task is not None:
                    row = f"id {quoted(str(task))}"
                    raise damaged_row(
                        table.name,
                        row,
                        column.name,
                        "it is not valid JSON",
                    )

    def _write(
        self,
        statement: Executable,
        rows: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Commit a statement, or the same statement for each row of a list, which may be empty."""
        if rows is None or rows:
            with self._begin() as connection:
                connection.execute(statement, rows)

    def _later(
        self,
        statement: Executable,
        row: Mapping[str, Any],
        key: Hashable | None = None,
    ) -> None:
        """Add a row to the next commit.

        Args:
            statement: one of few statements, the same object every time.
            row: its values.
            key: the row replaces a waiting row with the same key; None replaces nothing.

        Raises:
            StorageError: too many rows are waiting and cannot be written now; or the store is read
                only.
        """
        if self._read_only:
            raise StorageError(
                f"the store {self.path} was opened read-only: nothing can be written"
            )
        rows = self._waiting.setdefault(statement, {})
        if key is None:
            key = len(rows)
        # Removed and added again, because the newest row must be written last.
        rows.pop(key, None)
        rows[key] = row
        if len(rows) >= _MOST_WAITING:
            self.flush()

    def _rows(self, query: Select[Any]) -> Sequence[Any]:
        """Return the rows of a query, unchecked."""
        with self._transaction() as connection:
            return connection.execute(query).all()

    def _values(
        self,
        kind: type,
        names: Sequence[str],
        query: Select[Any],
    ) -> Iterator[list[Any]]:
        """Return the rows of a query for some fields of a kind of record, each value checked."""
        return (values_of(kind, names, row) for row in self._rows(query))

    def _all(
        self,
        kind: type[RecordT],
        query: Select[Any],
    ) -> list[RecordT]:
        """Return the records of a query."""
        with self._transaction() as connection:
            return [from_row(kind, row) for row in connection.execute(query)]

    def _first(
        self,
        kind: type[RecordT],
        query: Select[Any],
    ) -> RecordT | None:
        """Return the first record of a query; None if it has none."""
        records = self._all(kind, query.limit(1))
        return records[0] if records else None

    def _readable(
        self,
        kind: type[RecordT],
        query: Select[Any],
    ) -> list[RecordT]:
        """Return the readable records of a query; a warning names each of the others."""
        records = []
        for row in self._rows(query):
            try:
                records.append(from_row(kind, row))
            except DamagedRowError as error:
                _LOG.warning("a row is left out: %s", error)
        return records
