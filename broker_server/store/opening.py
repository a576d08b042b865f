"""Opening a store's database: made or upgraded for its one writer, left untouched for a reader.

Transactions begin and end where SQLAlchemy says, never where Python's sqlite3 guesses: it would
commit a change of the tables at once, and an upgrade that fails would leave half of itself behind.
"""

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool, StaticPool

from broker_server.store.schema import SCHEMA_VERSION, mark, metadata
from fleet_protocol.errors import StorageError
from fleet_protocol.private_folders import make_private_folder

BUSY_SECONDS = 10.0  # how long a reader waits for the transaction of another process
PATIENT_SECONDS = (
    60.0  # how long the server does: a backup of the database may lock it for as long as it takes
)

# Alembic hands its context to a migration through variables of its modules: one upgrade at a time
# in a process.
_ALEMBIC = threading.Lock()
_REMEDIES = {
    "is full": "free some space; nothing that is stored is lost",
    "is locked": "another process holds it, a backup or a look into it; let that one end",
    "readonly": "it can be read alone; look at how its disk is mounted, and whose its files are",
    "I/O error": "its disk fails; look into the log of the system",
    "malformed": "it is damaged; `shoal restore` makes a store from a backup",
}


def database_message(error: Exception) -> str:
    """What the database says, without the statement that it was given, and what to do."""
    told = str(getattr(error, "orig", None) or error)
    return "; ".join([told, *(remedy for word, remedy in _REMEDIES.items() if word in told)])


def open_for_writing(path: Path, *, durable: bool = True) -> Engine:
    """An engine of a database that is made if need be, and upgraded where it is older.

    Its commits are on the disk, or without `durable` where a killed process leaves them, but not a
    power cut.

    Raises:
        StorageError: it cannot be used, is no store, or was written by a newer version of Shoal.
    """
    try:
        make_private_folder(path.parent)
        _keep_private(path)
    except OSError as error:
        raise StorageError(f"cannot open the store {path}: {error}") from error
    engine = create_engine(
        URL.create("sqlite", database=str(path)),
        connect_args={"timeout": PATIENT_SECONDS, "isolation_level": None},
    )
    event.listen(
        engine,
        "connect",
        lambda connection, _: _set_up(connection, "FULL" if durable else "NORMAL"),
    )
    event.listen(engine, "begin", _begin)
    with _opening(engine, path):
        if _stored_version(engine, path) < SCHEMA_VERSION:
            _upgrade(engine, path)
    return engine


def _keep_private(path: Path) -> None:
    """Create a missing database, readable only by its owner.

    SQLite gives the files beside it the same rights.

    A database that everybody may read predates this rule, so it is restricted. Read rights of a
    group are kept, since somebody has set them on purpose.
    """
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    for file in (
        path,
        path.with_name(f"{path.name}-wal"),
        path.with_name(f"{path.name}-shm"),
    ):
        with suppress(FileNotFoundError, PermissionError):  # another user's file
            if file.stat().st_mode & 0o007:
                file.chmod(0o600)


def open_for_reading(path: Path) -> Engine:
    """Open a database so that nothing is written, neither into it nor beside it.

    One of an older version is upgraded in memory, as far as it is written now: looking at a store
    must not change it.

    Raises:
        StorageError: there is none, it cannot be read, is no store, or was written by a newer
            version of Shoal.
    """
    if not path.is_file():
        raise StorageError(
            f"there is no store in {path.parent}; `shoal run` or `shoal up` makes one"
        )
    # Every transaction connects anew: how to connect depends on whether a server works on the store
    # just now.
    engine = create_engine("sqlite://", creator=lambda: _connect_to_read(path), poolclass=NullPool)
    event.listen(engine, "begin", _begin)
    with _opening(engine, path):
        if _stored_version(engine, path) == SCHEMA_VERSION:
            return engine
    copy = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
    engine = create_engine("sqlite://", creator=lambda: copy, poolclass=StaticPool)
    event.listen(engine, "begin", _begin)
    with _opening(engine, path):
        with closing(_connect_to_read(path)) as source:
            source.backup(copy)
        _upgrade(engine, path)
        copy.execute("PRAGMA query_only=ON")
    return engine


def _connect_to_read(path: Path) -> sqlite3.Connection:
    """Connect without leaving SQLite's ``-wal`` and ``-shm`` files behind, or changing those of a
    server.
    """
    how = _how_to_read(path)
    while True:
        address = f"{path.absolute().as_uri()}?mode=ro{how}"
        connection = sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, isolation_level=None)
        try:  # the files are opened by the first look, and from then on kept
            connection.execute("SELECT 1 FROM sqlite_master").close()
        except sqlite3.OperationalError:
            connection.close()
            if how == (how := _how_to_read(path)):
                raise  # else a server has begun or ended its work meanwhile
        else:
            return connection


def _how_to_read(path: Path) -> str:
    log, shared = (path.with_name(path.name + ending) for ending in ("-wal", "-shm"))
    if not log.is_file() or not log.stat().st_size:
        # the database file is whole: read it without locks, for which SQLite would make files
        return "&immutable=1"
    if shared.is_file():
        # use what the server left or is using, without a mark of our own in it
        return "&readonly_shm=1"
    return ""  # a copy without its index, which SQLite must make anew


@contextmanager
def _opening(engine: Engine, path: Path) -> Iterator[None]:
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error, OSError) as error:
        engine.dispose()
        raise StorageError(f"cannot open the store {path}: {database_message(error)}") from error
    except StorageError:
        engine.dispose()
        raise


def _set_up(connection: sqlite3.Connection, synchronous: str) -> None:
    connection.execute("PRAGMA journal_mode=WAL").close()
    connection.execute(f"PRAGMA synchronous={synchronous}").close()


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN"))


def _stored_version(engine: Engine, path: Path) -> int:
    with engine.begin() as connection:
        return _version(connection, path)


def _version(connection: Connection, path: Path) -> int:
    """The version of the schema that a database has, 0 if it is empty."""
    tables = inspect(connection).get_table_names()
    if not tables:
        return 0
    text = str(connection.execute(select(mark)).scalar() if mark.table.name in tables else None)
    if not text.isdecimal():
        raise StorageError(
            f"{path} has tables but not the mark of a store: another program made it, or a Shoal from before schema "
            "version 3, which alone reads it; move the file away, or take another store folder"
        )
    found = int(text)
    if found > SCHEMA_VERSION:
        raise StorageError(
            f"the store {path} has schema version {found}, this Shoal reads up to {SCHEMA_VERSION}; use the newer "
            "version that wrote it, or another store folder"
        )
    return found


def _bring_up(connection: Connection, found: int) -> None:
    """Bring a database from a version, 0 if it is empty, to the newest, within the transaction that
    is open.
    """
    from alembic import command  # noqa: PLC0415  (which a start can do without)
    from alembic.config import Config  # noqa: PLC0415

    config = Config()
    config.set_main_option("script_location", "broker_server.store:migrations")
    config.attributes["connection"] = connection
    with _ALEMBIC:
        if found:
            command.upgrade(config, "head")
        else:
            metadata.create_all(connection)
            command.stamp(config, "head")


def _upgrade(engine: Engine, path: Path) -> None:
    # At once for writing, and only then looked at again: another process may have been first.
    with (
        engine.connect().execution_options(begin="BEGIN IMMEDIATE") as connection,
        connection.begin(),
    ):
        found = _version(connection, path)
        try:
            _bring_up(connection, found)
        except SQLAlchemyError as error:
            raise StorageError(
                f"cannot bring the store {path} from schema version {found} to {SCHEMA_VERSION}, it is left as it was: "
                f"use the Shoal that wrote it, or another store folder. {database_message(error)}"
            ) from error
