"""A store as one file, taken while its server works, and a store from such a file: a zip of database and blobs.

A server writes a blob before the commit that names it, and removes one after the commit that needs it no longer. So
who keeps it from committing finds every blob that goes with the database. Only links are made meanwhile.
"""

import contextlib
import secrets
import shutil
import sqlite3
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import BadZipFile, ZipFile

from broker_server.store.opening import PATIENT_SECONDS
from broker_server.store.repository import Store
from broker_server.store.update_store import FOLDER, updates_in
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.blobs import storage_error
from fleet_protocol.digests import blob_digest, matches, place_of
from fleet_protocol.errors import BlobError, ConfigError, StorageError

_DATABASE, _ROOTS = "shoal.db", ("blobs", "updates")
_WORK, _OLD_SECONDS = ".shoal-backup-", 86400.0


def sweep(store: Store, folder: Path) -> None:
    """Remove from an open store's folder what killed processes left, and what the last rounds of ended runs have sent.

    Nothing goes that the store does not know as a slice: its blobs may outlive a database that was lost or is older.
    """
    objects, runs = folder / "blobs" / "objects", store.runs()
    left = list(objects.glob("??/.*"))
    for run in runs if all(run.ended_at is not None for run in runs) else ():
        last = store.last_round(run.id)
        sent = store.tasks(run.id, last.number, "train") if last is not None else []
        slices = {choice.weights.digest for task in sent for choice in task.choices}
        left += [objects / place_of(digest) for digest in slices - store.used(slices)]
    for path in left:
        path.unlink(missing_ok=True)
    for path in folder.glob(f"{_WORK}*"):
        with contextlib.suppress(FileNotFoundError):  # a younger one may be at work, or end just now
            if path.stat().st_mtime < time.time() - _OLD_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def back_up(store: Path, file: Path) -> int:
    """Write a store to a file, replaced once it is whole, and count its blobs; a server at work waits for the links.

    Raises:
        StorageError: there is no store, its database is damaged, or something cannot be read or written.
        BlobError: a blob is damaged; the file of before stays.
    """
    Store(store, read_only=True).close()  # says what is wrong with it, and makes none
    source, part = store / _DATABASE, file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        part.touch(mode=0o600)  # as the store itself: whoever reads it has the model
        with TemporaryDirectory(dir=store, prefix=_WORK) as folder, ZipFile(part, "w") as out:
            made = Path(folder)
            with contextlib.closing(sqlite3.connect(source, PATIENT_SECONDS, isolation_level=None)) as holding:
                holding.execute("BEGIN IMMEDIATE")  # from here on the server cannot commit
                _copy(source, made / _DATABASE)
                needed = set(holding.execute("SELECT update_digest FROM tasks WHERE phase = 'received'"))
                files = [path for root in _ROOTS for path in (store / root / "objects").glob("*/[!.]*")]
                for path in [*files, *(store / "updates" / FOLDER).glob("*")]:
                    to = made / path.relative_to(store)
                    to.parent.mkdir(parents=True, exist_ok=True)
                    with contextlib.suppress(FileNotFoundError):  # of a round or version that is over
                        to.hardlink_to(path)
            out.comment = blob_digest((made / _DATABASE).read_bytes()).encode()  # blobs have theirs as a name
            batches = made / "updates" / FOLDER
            for path in batches.glob("*"):
                for digest, _, data in updates_in(path):
                    if (digest,) in needed:
                        write_atomically(batches.parent / "objects" / place_of(digest), data, durable=False)
            shutil.rmtree(batches, ignore_errors=True)
            found = [path for path in sorted(made.rglob("*")) if path.is_file()]
            for path in found:
                data = path.read_bytes()
                if path.name != _DATABASE and not matches(data, path.name):
                    raise BlobError(f"{path.relative_to(made)} in {store} is damaged, so no backup was made")
                out.writestr(str(path.relative_to(made)), data)
        part.replace(file)
    except OSError as error:
        raise storage_error("write", file, error) from error
    except sqlite3.Error as error:
        raise StorageError(f"cannot copy the database of {store}: {error}") from error
    finally:
        part.unlink(missing_ok=True)
    return len(found) - 1


def _copy(source: Path, target: Path) -> None:
    with contextlib.closing(sqlite3.connect(source)) as there, contextlib.closing(sqlite3.connect(target)) as copy:
        there.backup(copy)
        if (found := copy.execute("PRAGMA quick_check").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(found)
        copy.execute("PRAGMA journal_mode=DELETE")  # one file


def restore(file: Path, store: Path) -> None:
    """Make a store from a file that `back_up` wrote; it is in its place once all of it was checked.

    Raises:
        ConfigError: something is there.
        BlobError: the file is torn, damaged or no backup.
        StorageError: it cannot be read or written, or holds a store of a newer Shoal.
    """
    store = store.resolve()  # "." has no name
    if store.exists() and (not store.is_dir() or any(store.iterdir())):
        raise ConfigError(f"{store} is there already; stop its server and move it away, or take another folder")
    made = store.with_name(f".{store.name}.{secrets.token_hex(4)}")
    try:
        made.mkdir(mode=0o700, parents=True)
        with ZipFile(file) as archive:
            for name in archive.namelist():
                # Where it goes follows from its digest, so that no name leads out of the folder.
                digest = archive.comment.decode() if name == _DATABASE else Path(name).name
                data, places = archive.read(name), [str(Path(root, "objects", place_of(digest))) for root in _ROOTS]
                if name not in {_DATABASE, *places} or not matches(data, digest):
                    raise BlobError(f"{name} in {file} is damaged, or not of a store; take another backup")
                write_atomically(made / name, data)
        Store(made, read_only=True).close()
        made.rename(store)
    except (BadZipFile, ValueError) as error:
        raise BlobError(f"{file} is no whole backup of a store: {error}") from error
    except OSError as error:
        raise storage_error("restore", file, error) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
