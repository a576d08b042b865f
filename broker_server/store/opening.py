"""Opens a store's database: creates or upgrades it for its one writer, never for a reader.

Transactions begin and end where SQLAlchemy requests it, never where Python's sqlite3 guesses:
sqlite3 would commit a schema change immediately, and a failed upgrade would leave half of itself
behind.
"""

import os
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool, StaticPool

from broker_server.store.schema import SCHEMA_VERSION, mark, metadata
from fleet_protocol.errors import StorageError
from fleet_protocol.private_folders import make_private_folder

BUSY_SECONDS = 10.0
"""How long a reader waits for the transaction of another process."""

PATIENT_SECONDS = 60.0
"""How long a server waits: a backup may lock the database for as long as it takes to copy it."""

_UNREADABLE_INDEX = "attempt to write a readonly database"
"""SQLite's wording if the index of a log must be built again, and this connection only reads."""

_INDEX_SECONDS = 0.005
"""Time after which a reader checks whether a server has written the index."""

# Alembic passes its context to a migration in module variables, so only one upgrade runs at a time
# in a process.
_ALEMBIC = threading.Lock()
_REMEDIES = {
    "is full": "free some space; no stored data is lost",
    "is locked": "another process, such as a backup or a reader, has locked it; wait until it ends",
    "readonly": "it is read-only; check how its disk is mounted, and who owns its files",
    "I/O error": "its disk fails; check the system's log",
    "malformed": "it is damaged; `shoal restore` makes a store from a backup",
}


def database_message(error: Exception) -> str:
    """Return the database's own message without the SQL statement, and the remedy."""
    message = str(getattr(error, "orig", None) or error)
    remedies = [remedy for word, remedy in _REMEDIES.items() if word in message]
    return "; ".join([message, *remedies])


def open_for_writing(path: Path, *, durable: bool = True) -> Engine:
    """Open a database for its server; create a missing one, and upgrade an older one.

    Args:
        path: the file of the database.
        durable: commits survive a power cut; otherwise they survive only the end of the process.

    Raises:
        StorageError: it cannot be used, is not a store, or was written by a newer version of Shoal.
    """
    _require_regular(path)
    try:
        make_private_folder(path.parent)
        _keep_private(path)
    except OSError as error:
        raise StorageError(f"cannot open the store {path}: {error}") from error
    engine = create_engine(
        URL.create("sqlite", database=str(path)),
        connect_args={"timeout": PATIENT_SECONDS, "isolation_level": None},
    )
    synchronous = "FULL" if durable else "NORMAL"
    event.listen(engine, "connect", lambda connection, _: _set_up(connection, synchronous))
    event.listen(engine, "begin", _begin)
    with _opening(engine, path):
        if _stored_version(engine, path) < SCHEMA_VERSION:
            _upgrade(engine, path)
    return engine


def _keep_private(path: Path) -> None:
    """Create a missing database, readable only by its owner.

    SQLite gives the files beside it the same rights.

    A database that everybody may read is older than this rule, so its rights are restricted. Read
    rights of a group are kept, because somebody has set them on purpose.
    """
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    for ending in ("", "-wal", "-shm"):
        file = path.with_name(f"{path.name}{ending}")
        # Another user's file cannot be restricted.
        with suppress(FileNotFoundError, PermissionError):
            if file.stat().st_mode & 0o007:
                file.chmod(0o600)


def _require_regular(path: Path) -> None:
    """Refuse a database of which a part is a link or no file: SQLite would write elsewhere.

    Raises:
        StorageError: the message names the part.
    """
    for ending in ("", "-wal", "-shm"):
        file = path.with_name(f"{path.name}{ending}")
        with suppress(FileNotFoundError, NotADirectoryError):
            if not stat.S_ISREG(file.lstat().st_mode):
                raise StorageError(
                    f"{file} is a link, or is not a file, so this is not a store that Shoal has "
                    "made: move it away, or copy the file itself to this place"
                )


def open_for_reading(path: Path) -> Engine:
    """Open a database without writing anything, neither into it nor beside it.

    An older version is upgraded in memory: reading a store must not change it.

    Raises:
        StorageError: it does not exist, cannot be read, is not a store, or was written by a newer
            version of Shoal.
    """
    _require_regular(path)
    if not path.is_file():
        raise StorageError(
            f"there is no store in {path.parent}; name its folder with `--store PATH`, or "
            "create one with `shoal run` or `shoal up`"
        )
    # Every transaction opens a new connection, because the options depend on whether a
    # server is using the store at that moment.
    engine = create_engine("sqlite://", creator=lambda: _connect_to_read(path), poolclass=NullPool)
    # Its connections already have an open transaction, so none is begun.
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
    """Connect without leaving SQLite's ``-wal`` and ``-shm`` files or changing a server's.

    Returns:
        A connection with an open transaction: all later queries see the same data as its first, so
        that none of them can fail because a server begins or ends its work meanwhile.

    Raises:
        sqlite3.OperationalError: it cannot be read.
    """
    deadline = time.monotonic() + BUSY_SECONDS
    pause = threading.Event()  # never set
    options = _how_to_read(path)
    while True:
        address = f"{path.absolute().as_uri()}?mode=ro{options}"
        connection = sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, isolation_level=None)
        try:
            connection.execute("BEGIN").close()
            # The first query opens the files, which then stay open.
            connection.execute("SELECT 1 FROM sqlite_master").close()
        except sqlite3.OperationalError as error:
            connection.close()
            options_before = options
            options = _how_to_read(path)
            # Otherwise a server has begun or ended its work meanwhile: try again.
            if options == options_before:
                if _UNREADABLE_INDEX not in str(error) or time.monotonic() > deadline:
                    raise
                # A server writes the index of its log; a reader may not.
                pause.wait(_INDEX_SECONDS)
        except UnicodeDecodeError:
            connection.close()
            raise
        else:
            return connection


def _how_to_read(path: Path) -> str:
    """Return SQLite's options for a reader, from the files that a server left beside a database."""
    log = path.with_name(f"{path.name}-wal")
    shared = path.with_name(f"{path.name}-shm")
    if not _size(log):
        # The database file is whole. Read it without locks, because SQLite would create files for
        # them.
        return "&immutable=1"
    if shared.is_file():
        # Use the server's index of the log, without recording this reader in it.
        return "&readonly_shm=1"
    # A copy without the index of its log, which SQLite must create.
    return ""


def _size(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it does not exist, as a server may remove it."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@contextmanager
def _opening(engine: Engine, path: Path) -> Iterator[None]:
    try:
        yield
    # SQLite's messages may contain a name from a damaged schema that is not text.
    except (SQLAlchemyError, sqlite3.Error, OSError, UnicodeDecodeError) as error:
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
    """Return the version of a database's schema, 0 if the database is empty."""
    tables = inspect(connection).get_table_names()
    if not tables:
        return 0
    text = ""
    if mark.table.name in tables:
        text = str(connection.execute(select(mark)).scalar())
    if not text.isdecimal():
        raise StorageError(
            f"{path} has tables but not the mark of a store: another program made it, or a "
            "Shoal from before schema version 3, and only that can read it; move the file "
            "away, or use another store folder"
        )
    version = int(text)
    if version > SCHEMA_VERSION:
        raise StorageError(
            f"the store {path} has schema version {version}, but this Shoal reads up to "
            f"{SCHEMA_VERSION}; use the newer version that wrote it, or another store folder"
        )
    return version


def _migrate(connection: Connection, version: int) -> None:
    """Upgrade a database to the newest version, within the open transaction.

    Args:
        connection: the transaction.
        version: the database's version, 0 if it is empty.
    """
    # Imported late: a start with a database of the newest version does not need it.
    from alembic import command  # noqa: PLC0415
    from alembic.config import Config  # noqa: PLC0415

    config = Config()
    config.set_main_option("script_location", "broker_server.store:migrations")
    config.attributes["connection"] = connection
    with _ALEMBIC:
        if version:
            command.upgrade(config, "head")
        else:
            metadata.create_all(connection)
            command.stamp(config, "head")


def _upgrade(engine: Engine, path: Path) -> None:
    # Locked for writing before the version is read again: another process may have been first.
    with (
        engine.connect().execution_options(begin="BEGIN IMMEDIATE") as connection,
        connection.begin(),
    ):
        version = _version(connection, path)
        try:
            _migrate(connection, version)
        except SQLAlchemyError as error:
            raise StorageError(
                f"cannot upgrade the store {path} from schema version {version} to "
                f"{SCHEMA_VERSION}; it is unchanged: use the Shoal that wrote it, or another "
                f"store folder. {database_message(error)}"
            ) from error
