"""Writes a store to one file while its server works: a zip of database and blobs, signed by its
owner.

`broker_server.store.restoring` turns the file into a store again.

A server writes a blob before the commit that names it, and removes one after the commit that needs
it no longer. So who keeps it from committing finds every blob that goes with the database. Only
links are made meanwhile.
"""

import contextlib
import logging
import secrets
import shutil
import sqlite3
import time
from collections.abc import Sequence
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
from broker_server.store.update_store import FOLDER, updates_in
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.digests import blob_path, file_digest, file_matches
from fleet_protocol.disk import storage_error
from fleet_protocol.errors import BlobError, StorageError

DATABASE = "shoal.db"
ROOTS = ("blobs", "updates")
"""The contents of a store's folder: the database, and folders of blobs."""

_WORK = ".shoal-backup-"
_OLD_SECONDS = 86400.0
_LOG = logging.getLogger(__name__)


def remove_leftovers(store: Store, folder: Path) -> None:
    """Remove from an open store's folder what killed processes left, and what the last rounds of
    ended runs have sent.

    Nothing goes that the store does not know as a slice: its blobs may outlive a database that was
    lost or is older. Where a row cannot be read, all slices stay.
    """
    objects = folder / "blobs" / "objects"
    left = list(objects.glob("??/.*"))
    try:
        left += [objects / blob_path(digest) for digest in _sent_last(store)]
    except DamagedRowError as error:
        _LOG.warning("what ended runs have sent is not removed: %s", error)
    for path in left:
        path.unlink(missing_ok=True)
    for path in folder.glob(f"{_WORK}*"):
        with contextlib.suppress(
            FileNotFoundError
        ):  # a younger one may be at work, or end just now
            if path.stat().st_mtime < time.time() - _OLD_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def _sent_last(store: Store) -> set[str]:
    """Slices that the last rounds of runs have sent, and that nobody needs as all of them have
    ended.
    """
    runs = store.runs()
    digests: set[str] = set()
    for run in runs if all(run.ended_at is not None for run in runs) else ():
        last = store.last_round(run.id)
        sent = store.tasks(run.id, last.number, "train") if last is not None else []
        slices = {choice.weights.digest for task in sent for choice in task.choices}
        digests |= slices - store.used_blobs(slices)
    return digests


def back_up(store: Path, file: Path, signers: Sequence[Signer]) -> int:
    """Write a store to a file, replaced once it is whole, and count its blobs.

    A server at work waits for the links.

    Args:
        store: folder of the store.
        file: the file to write, readable only by the owner.
        signers: the signers, each with its own key.

    Raises:
        StorageError: there is no store, its database is damaged, or something cannot be read or
            written.
        BlobError: a blob is damaged; the file of before stays.
    """
    Store(store, read_only=True).close()  # says what is wrong with it, and makes none
    part = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        part.touch(mode=0o600)  # as the store itself: whoever reads it has the model
        with TemporaryDirectory(dir=store, prefix=_WORK) as folder:
            made = Path(folder)
            _link(store, made)
            members = _members(store, made)
            _pack(made, members, part, signers)
        part.replace(file)
    except OSError as error:
        raise storage_error("write", file, error) from error
    except sqlite3.Error as error:
        raise StorageError(f"cannot copy the database of {store}: {error}") from error
    finally:
        part.unlink(missing_ok=True)
    return len(members) - 1


def _link(store: Path, made: Path) -> None:
    """Copy a store's database to a folder, with links to its blobs and to the updates that it
    needs.
    """
    source = store / DATABASE
    with contextlib.closing(
        sqlite3.connect(source, PATIENT_SECONDS, isolation_level=None)
    ) as holding:
        holding.execute("BEGIN IMMEDIATE")  # blocks commits of the server from here on
        _copy(source, made / DATABASE)
        needed = set(holding.execute("SELECT update_digest FROM tasks WHERE phase = 'received'"))
        files = [path for root in ROOTS for path in (store / root / "objects").glob("*/[!.]*")]
        for path in [*files, *(store / "updates" / FOLDER).glob("*")]:
            to = made / path.relative_to(store)
            to.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(
                FileNotFoundError
            ):  # belongs to a round or version that has ended
                to.hardlink_to(path)
    batches = made / "updates" / FOLDER
    for path in batches.glob("*"):
        for digest, _, data in updates_in(path):
            if (digest,) in needed:
                write_atomically(
                    batches.parent / "objects" / blob_path(digest), data, durable=False
                )
    shutil.rmtree(batches, ignore_errors=True)


def _members(store: Path, made: Path) -> list[Member]:
    """List the files in a folder from `_link`.

    Raise a BlobError if a blob does not match its name.
    """
    members = []
    for path in sorted(made.rglob("*")):
        if not path.is_file():
            continue
        name = path.relative_to(made).as_posix()
        if path.name != DATABASE and not file_matches(path, path.name):
            raise BlobError(f"{name} in {store} is damaged, so no backup was written")
        digest = file_digest(path) if path.name == DATABASE else path.name
        members.append(Member(name, digest, path.stat().st_size))
    return members


def _pack(made: Path, members: Sequence[Member], part: Path, signers: Sequence[Signer]) -> None:
    """Write members, their inventory and its signatures.

    Members are not compressed, so none unpacks to more.
    """
    inventory = write_inventory(members)
    with ZipFile(part, "w", strict_timestamps=False) as archive:
        for member in members:
            archive.write(made / member.name, member.name)
        archive.writestr(INVENTORY, inventory)
        archive.writestr(SIGNATURES, sign(inventory, signers))


def _copy(source: Path, target: Path) -> None:
    with (
        contextlib.closing(sqlite3.connect(source)) as there,
        contextlib.closing(sqlite3.connect(target)) as copy,
    ):
        there.backup(copy)
        if (found := copy.execute("PRAGMA quick_check").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(found)
        copy.execute("PRAGMA journal_mode=DELETE")  # one file
