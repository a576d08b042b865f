"""The database of a store: opened once, then used in transactions that return records.

What may be lost with a killed server (who was there, lines of the log, counts) waits in memory and is written with the
next commit, or by `Database.flush` now and then: a commit waits for the disk, and a fleet says much at once.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Executable, Select
from sqlalchemy.exc import SQLAlchemyError

from broker_server.store.opening import open_for_reading, open_for_writing, said
from broker_server.store.rows import from_row
from fleet_protocol.errors import StorageError

RecordT = TypeVar("RecordT")

_MOST_WAITING = 4096  # rows of one kind; a flood must not fill the memory


class Database:
    """What the tables of a store share.

    Args:
        folder: holds ``shoal.db`` and, beside it, the blobs; it is made.
        read_only: write nothing, neither into the folder nor into the database, and refuse to make a store where
            there is none. A store of an older version is read as it would be once it is upgraded.
        durable: let a commit wait for the disk; else a power cut may take the last ones, but a killed process none.

    Raises:
        StorageError: the folder cannot be used, or was written by a newer version of Shoal.
    """

    def __init__(self, folder: Path, *, read_only: bool = False, durable: bool = True) -> None:
        self.folder = folder
        self.path = folder / "shoal.db"
        self._read_only = read_only
        self._engine = open_for_reading(self.path) if read_only else open_for_writing(self.path, durable=durable)
        self._waiting: dict[Executable, dict[Hashable, Mapping[str, Any]]] = {}

    def close(self) -> None:
        """Write what waits, and close every connection; a StorageError where that cannot be written."""
        try:
            self.flush()
        finally:
            self._engine.dispose()

    def flush(self) -> None:
        """Commit what waits; a StorageError where the disk is full or cannot be written."""
        if self._waiting:
            with self._begin():
                pass

    @contextmanager
    def _begin(self) -> Iterator[Connection]:
        """A transaction that writes, with it what waits."""
        with self._transaction() as connection:
            for statement, rows in self._waiting.items():
                connection.execute(statement, list(rows.values()))
            yield connection
        self._waiting.clear()

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise StorageError(f"cannot use the store {self.path}: {said(error)}") from error

    def _write(self, statement: Executable, rows: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Commit a statement, or the same for each of some rows; of none there is nothing to commit."""
        if rows is None or rows:
            with self._begin() as connection:
                connection.execute(statement, rows)

    def _later(self, statement: Executable, row: Mapping[str, Any], key: Hashable | None = None) -> None:
        """Let a row wait for the next commit, with one of few statements, the same object every time.

        A row takes the place of one that still waits with the same key. A StorageError says that so many wait that they
        are written now, and cannot be; or that the store is read only.
        """
        if self._read_only:
            raise StorageError(f"the store {self.path} was opened readonly: nothing can be written")
        rows = self._waiting.setdefault(statement, {})
        if key is None:
            key = len(rows)
        rows.pop(key, None)  # the newest is written last
        rows[key] = row
        if len(rows) >= _MOST_WAITING:
            self.flush()

    def _rows(self, query: Select[Any]) -> Sequence[Any]:
        with self._transaction() as connection:
            return connection.execute(query).all()

    def _all(self, kind: type[RecordT], query: Select[Any]) -> list[RecordT]:
        with self._transaction() as connection:
            return [from_row(kind, row) for row in connection.execute(query)]

    def _first(self, kind: type[RecordT], query: Select[Any]) -> RecordT | None:
        found = self._all(kind, query.limit(1))
        return found[0] if found else None
