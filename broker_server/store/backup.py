"""Writes a store to one file while its server works: a signed zip of database and blobs.

`broker_server.store.restoring` turns the file into a store again.

A server writes a blob before the commit that names it, and removes it after the commit that no
longer needs it. While the server cannot commit, every blob of the database therefore exists. The
server waits only as long as it takes to copy the database and link the blobs.
"""

import contextlib
import errno
import logging
import secrets
import shutil
import sqlite3
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from broker_server.store.backup_signature import (
    INVENTORY,
    SIGNATURES,
    Member,
    Signer,
    sign,
    write_inventory,
)
from broker_server.store.opening import PATIENT_SECONDS
from broker_server.store.repository import Store
from broker_server.store.rows import DamagedRowError
from broker_server.store.schema import DATABASE
from broker_server.store.update_store import FOLDER, updates_in
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.digests import blob_path, file_digest, file_matches
from fleet_protocol.disk import storage_error
from fleet_protocol.errors import BlobError, StorageError

ROOTS = ("blobs", "updates")
"""The contents of a store's folder: the database, and folders of blobs."""

_WORK = ".shoal-backup-"
_OLD_SECONDS = 86400.0
_LOG = logging.getLogger(__name__)

_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
"""Errors of file systems without hard links, and of a file with as many links as it can have."""


def remove_leftovers(store: Store, folder: Path) -> None:
    """Remove files that killed processes left, and slices that ended runs have sent.

    A blob is removed only if the store lists it as a slice: blobs may outlive a database that was
    lost or is older. If a row cannot be read, all slices stay.

    Args:
        store: the open store.
        folder: its folder.
    """
    objects = folder / "blobs" / "objects"
    leftovers = list(objects.glob("??/.*"))
    try:
        leftovers += [objects / blob_path(digest) for digest in _unused_slices(store)]
    except DamagedRowError as error:
        _LOG.warning("cannot remove the slices of ended runs: %s", error)
    for path in leftovers:
        path.unlink(missing_ok=True)
    for path in folder.glob(f"{_WORK}*"):
        # Another backup may be running, and end just now.
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < time.time() - _OLD_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def _unused_slices(store: Store) -> set[str]:
    """Return the slices that the last rounds of runs have sent, once all runs have ended."""
    runs = store.runs()
    if any(run.ended_at is None for run in runs):
        return set()
    unused: set[str] = set()
    for run in runs:
        last = store.last_round(run.id)
        if last is None:
            continue
        slices: set[str] = set()
        for task in store.tasks(run.id, last.number, "train"):
            slices.update(choice.weights.digest for choice in task.choices)
        # A slice that is the whole model is the same blob as a version.
        unused |= slices - store.used_blobs(slices)
    return unused


def back_up(store: Path, file: Path, signers: Sequence[Signer]) -> int:
    """Write a store to a file, which is replaced once the backup is whole.

    A running server waits until the blobs are linked.

    Args:
        store: folder of the store.
        file: the file to write, readable only by the owner.
        signers: the signers, each with its own key.

    Returns:
        The number of blobs.

    Raises:
        StorageError: there is no store, its database is damaged, or a file cannot be read or
            written.
        BlobError: a blob is damaged; the previous file stays.
    """
    # Raises an error if there is no store, or it is damaged.
    Store(store, read_only=True).close()
    if file.is_dir():
        raise StorageError(
            f"{file} is a folder, but a backup is a file; name a file in it, such as "
            f"{file / 'store.zip'}"
        )
    draft = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        # Private, as the store itself: the file contains the model.
        draft.touch(mode=0o600)
        with TemporaryDirectory(dir=store, prefix=_WORK) as folder:
            snapshot = Path(folder)
            _make_snapshot(store, snapshot)
            members = _list_members(store, snapshot)
            _pack(snapshot, members, draft, signers)
        draft.replace(file)
    except OSError as error:
        raise storage_error("write", file, error) from error
    except sqlite3.Error as error:
        raise StorageError(f"cannot copy the database of {store}: {error}") from error
    finally:
        draft.unlink(missing_ok=True)
    return len(members) - 1


def _make_snapshot(store: Path, snapshot: Path) -> None:
    """Copy a store's database to a folder, and link the blobs and updates that it needs."""
    source = store / DATABASE
    with contextlib.closing(
        sqlite3.connect(source, PATIENT_SECONDS, isolation_level=None)
    ) as connection:
        # The server's commits wait from here on.
        connection.execute("BEGIN IMMEDIATE")
        _copy(source, snapshot / DATABASE)
        query = "SELECT update_digest FROM tasks WHERE phase = 'received'"
        needed_updates = {digest for (digest,) in connection.execute(query)}
        for root in ROOTS:
            _link_files((store / root / "objects").glob("*/[!.]*"), store, snapshot)
        _link_files((store / "updates" / FOLDER).glob("*"), store, snapshot)
    _separate_updates(snapshot / "updates", needed_updates)


def _link_files(files: Iterable[Path], store: Path, snapshot: Path) -> None:
    """Link files of a store to the same places in another folder."""
    for path in files:
        link = snapshot / path.relative_to(store)
        link.parent.mkdir(parents=True, exist_ok=True)
        # A blob of a round or version that has just ended may have been removed.
        with contextlib.suppress(FileNotFoundError):
            _link_or_copy(path, link)


def _link_or_copy(path: Path, link: Path) -> None:
    """Link a file to another place; copy it where the file system has no links, such as exFAT."""
    try:
        link.hardlink_to(path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(path, link)


def _separate_updates(updates: Path, needed: Collection[str]) -> None:
    """Replace files of many updates by a blob for each update that is needed."""
    batches = updates / FOLDER
    for path in batches.glob("*"):
        for digest, _, data in updates_in(path):
            if digest in needed:
                write_atomically(updates / "objects" / blob_path(digest), data, durable=False)
    shutil.rmtree(batches, ignore_errors=True)


def _list_members(store: Path, snapshot: Path) -> list[Member]:
    """List the files of a snapshot.

    Raises:
        BlobError: a blob does not match its name.
    """
    members = []
    for path in sorted(snapshot.rglob("*")):
        if not path.is_file():
            continue
        name = path.relative_to(snapshot).as_posix()
        digest = path.name
        if path.name == DATABASE:
            digest = file_digest(path)
        elif not file_matches(path, digest):
            raise BlobError(f"{name} in {store} is damaged, so no backup was written")
        members.append(Member(name, digest, path.stat().st_size))
    return members


def _pack(
    snapshot: Path,
    members: Sequence[Member],
    file: Path,
    signers: Sequence[Signer],
) -> None:
    """Write members, their inventory and its signatures.

    Members are not compressed, so none unpacks to more bytes than it has in the file.
    """
    inventory = write_inventory(members)
    with ZipFile(file, "w", strict_timestamps=False) as archive:
        for member in members:
            archive.write(snapshot / member.name, member.name)
        archive.writestr(INVENTORY, inventory)
        archive.writestr(SIGNATURES, sign(inventory, signers))


def _copy(source: Path, target: Path) -> None:
    """Copy a database into one file, and check the copy."""
    with (
        contextlib.closing(sqlite3.connect(source)) as original,
        contextlib.closing(sqlite3.connect(target)) as copy,
    ):
        original.backup(copy)
        state = copy.execute("PRAGMA quick_check").fetchone()[0]
        if state != "ok":
            raise sqlite3.DatabaseError(state)
        # Without a write-ahead log beside it.
        copy.execute("PRAGMA journal_mode=DELETE")
