"""Makes a store from a backup: checks first the signature, then all contents, in bounded memory."""

import contextlib
import re
import secrets
import shutil
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from broker_server.store.backup import ROOTS
from broker_server.store.backup_signature import (
    INVENTORY,
    SIGNATURES,
    SIGNATURES_LIMIT,
    BackupStatement,
    Member,
    read_inventory,
    read_statements,
)
from broker_server.store.repository import Store
from broker_server.store.rows import DamagedRowError
from broker_server.store.schema import DATABASE
from broker_server.store.table_check import unexpected_part
from fleet_protocol.blob_store import replacing
from fleet_protocol.digests import DIGEST_PATTERN, blob_path, pieces_match
from fleet_protocol.disk import storage_error
from fleet_protocol.errors import BlobError, ConfigError
from fleet_protocol.foreign_archives import (
    Archive,
    BeyondBoundsError,
    Bounds,
    open_archive,
)
from fleet_protocol.foreign_files import quoted

MOST_FILES = 100_000
MOST_BYTES = 64 * 10**9
"""Default limits of a restore."""

_LINE_BYTES = 300  # most bytes of a member's line in the inventory
_OTHER_MEMBERS = 3  # of a backup besides blobs: the database, the inventory and its signatures
_HELP = (
    "`shoal restore --trust` lists the names in its runs (paths, programs, addresses), "
    "ignores them, and restores the rest"
)


def restore(  # noqa: PLR0913  (options by keyword)
    file: Path,
    store: Path,
    *,
    known: Collection[str] = (),
    trust: bool = False,
    most_files: int = MOST_FILES,
    most_bytes: int = MOST_BYTES,
    inspect: Callable[[Store], None] | None = None,
) -> tuple[BackupStatement, ...]:
    """Make a store from a file of `back_up`; the store appears in its place after all checks.

    Args:
        file: the backup.
        store: folder to create.
        known: public keys in hexadecimal, of which one must have signed it.
        trust: accept a backup that is not signed, or signed with other keys.
        most_files: most blobs that it may contain.
        most_bytes: most bytes of all its files together.
        inspect: called with a stranger's store before it is put in its place; an error prevents
            that.

    Returns:
        The names of its signers; empty for an old backup without a signature.

    Raises:
        ConfigError: the folder exists already; or no known key has signed it.
        BlobError: the file is truncated, damaged, changed, larger than the bounds or not a backup.
        StorageError: it cannot be read or written, or contains a store of a newer Shoal.
    """
    store = store.resolve()  # "." has no name
    if store.exists() and (not store.is_dir() or any(store.iterdir())):
        raise ConfigError(
            f"{store} exists already; stop its server and move it away, or use another folder"
        )
    draft = store.with_name(f".{store.name}.{secrets.token_hex(4)}")
    bounds = Bounds(members=most_files + _OTHER_MEMBERS, unpacked_bytes=most_bytes, ratio=1.0)
    try:
        with contextlib.ExitStack() as stack:
            archive = _open(stack, file, bounds)
            statements, digests = _read_contents(archive, file)
            if not trust:
                _check_signer(file, statements, known)
            draft.mkdir(mode=0o700, parents=True)
            for name, digest in digests.items():
                _unpack(archive, file, name, digest, draft / name)
        _check_tables(draft / DATABASE, file)
        is_foreign = not any(statement.key in known for statement in statements)
        with contextlib.closing(Store(draft, read_only=True)) as opened:
            # Opened in any case: that detects a store of a newer Shoal.
            if is_foreign:
                _inspect_foreign(opened, file, inspect)
        draft.rename(store)
    except OSError as error:
        raise storage_error("restore", file, error) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return statements


def _inspect_foreign(
    store: Store,
    file: Path,
    inspect: Callable[[Store], None] | None,
) -> None:
    """Read every row of a stranger's store, and let the caller inspect it.

    Raises:
        BlobError: its rows are not those of a store, or the caller cannot display its names.
    """
    try:
        store.check_rows()
        if inspect is not None:
            inspect(store)
    except (ConfigError, DamagedRowError) as error:
        raise BlobError(f"the database in {file} does not belong to a store: {error}") from error


def _open(stack: contextlib.ExitStack, file: Path, bounds: Bounds) -> Archive:
    try:
        return stack.enter_context(open_archive(file, bounds))
    except BeyondBoundsError as error:
        raise BlobError(
            f"{error}; if the backup is larger and trusted, raise --most-bytes or --most-files"
        ) from error


def _read_contents(
    archive: Archive, file: Path
) -> tuple[tuple[BackupStatement, ...], Mapping[str, str]]:
    """Read the list of a backup's contents before they are unpacked.

    Returns:
        The statements of its signers, and the digest that each file of the store must have, by
        name.

    Raises:
        BlobError: its contents differ from what was signed, or it has members that no store has.
    """
    if SIGNATURES not in archive.members:
        statements: tuple[BackupStatement, ...] = ()
        names: list[str] = list(archive.members)
        database = archive.comment.decode(errors="replace")
    else:
        statements, names, database = _signed_contents(archive, file)
    # Blobs have their digests as names.
    digests = {name: name.rpartition("/")[2] for name in names}
    if DATABASE in digests:
        digests[DATABASE] = database
    for name, digest in digests.items():
        if not re.fullmatch(DIGEST_PATTERN, digest) or name not in _places(name, digest):
            raise BlobError(
                f"{quoted(name)} in {file} is damaged, or not part of a store; use another backup"
            )
    if DATABASE not in digests:
        raise BlobError(f"{file} is not a complete backup of a store: it has no {DATABASE}")
    return statements, digests


def _places(name: str, digest: str) -> Collection[str]:
    """Return the names that a file of a store may have.

    They follow from its digest, so no name leads out of the folder.
    """
    if name == DATABASE:
        return (DATABASE,)
    return [Path(root, "objects", blob_path(digest)).as_posix() for root in ROOTS]


def _signed_contents(
    archive: Archive, file: Path
) -> tuple[tuple[BackupStatement, ...], list[str], str]:
    """Return statements, names of the store's files, and the database's digest, as signed."""
    limit = len(archive.members) * _LINE_BYTES
    try:
        inventory = archive.read(INVENTORY, limit)
        statements = read_statements(archive.read(SIGNATURES, SIGNATURES_LIMIT), inventory)
        listed = read_inventory(inventory)
    except BlobError as error:
        raise BlobError(f"{file} is not a complete backup of a store: {error}") from error
    sizes = dict(archive.members)
    for name in (INVENTORY, SIGNATURES):
        del sizes[name]
    if archive.comment or sizes.keys() != listed.keys():
        raise _changed_members(file, sizes, listed)
    for name, size in sizes.items():
        if size != listed[name].size:
            raise BlobError(
                f"{file} was changed: {quoted(name)} has {size} bytes instead of"
                f" {listed[name].size}"
            )
        if name != DATABASE and listed[name].digest != name.rpartition("/")[2]:
            raise BlobError(f"{file} was changed: {quoted(name)} is listed under another digest")
    database = listed[DATABASE].digest if DATABASE in listed else ""
    return statements, list(sizes), database


def _changed_members(
    file: Path,
    sizes: Mapping[str, int],
    listed: Mapping[str, Member],
) -> BlobError:
    """Return the error of a backup with a comment, or with other members than those listed."""
    differing = sorted(sizes.keys() ^ listed.keys())
    if not differing:
        return BlobError(
            f"{file} was changed: it has a comment, which is not signed; use another backup"
        )
    problem = "was added after it was signed" if differing[0] in sizes else "is missing"
    return BlobError(f"{file} was changed: {quoted(differing[0])} {problem}; use another backup")


def _check_signer(
    file: Path, statements: Sequence[BackupStatement], known: Collection[str]
) -> None:
    if not statements:
        raise ConfigError(f"{file} is not signed, so its origin is unknown; {_HELP}")
    if not any(statement.key in known for statement in statements):
        whose = " and ".join(statement.shown for statement in statements)
        raise ConfigError(
            f"{file} was signed by {whose}, not by you or the operator of this fleet; {_HELP}"
        )


def _unpack(archive: Archive, file: Path, name: str, digest: str, target: Path) -> None:
    """Write a member to its place in pieces, and check its digest."""
    with replacing(target) as out:
        if not pieces_match(_written(archive.pieces(name), out), digest):
            raise BlobError(
                f"{quoted(name)} in {file} is damaged, or not part of a store; use another backup"
            )


def _written(pieces: Iterable[bytes], out: IO[bytes]) -> Iterator[bytes]:
    """Write pieces while their digest is computed, so that all are read only once."""
    for piece in pieces:
        out.write(piece)
        yield piece


def _check_tables(database: Path, file: Path) -> None:
    """Check that a database is intact and has only the tables of a store.

    Other objects could run a program of the backup's author.

    Raises:
        BlobError: it is damaged, or contains anything else.
    """
    address = f"{database.absolute().as_uri()}?mode=ro&immutable=1"
    try:
        with contextlib.closing(sqlite3.connect(address, uri=True)) as opened:
            # No store has a name that is not text.
            opened.text_factory = partial(str, encoding="utf-8", errors="backslashreplace")
            opened.execute("PRAGMA trusted_schema=OFF")
            unexpected = unexpected_part(opened)
            state = opened.execute("PRAGMA quick_check(1)").fetchone()[0]
    # SQLite's messages may contain a name that is not text.
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise BlobError(
            f"the database in {file} is damaged: {error}; use another backup"
        ) from error
    if unexpected is not None:
        raise BlobError(f"the database in {file} has {unexpected}, which does not occur in a store")
    if state != "ok":
        raise BlobError(f"the database in {file} is damaged: {state}; use another backup")
