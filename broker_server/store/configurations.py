"""Saves the configurations of runs in files beside the database; servers open and call only what these files name.

Anyone who can change the database, or supplies a backup, could write any path, address or function into
the configuration of a run. So a store keeps a copy of every configuration with which a run begins or
resumes, in ``configurations`` of its folder, readable only by its owner. Backups do not include it, and
restores do not create it. The database's configuration only provides numbers and words to show.
"""

import os
import re
import stat
from pathlib import Path

from broker_server.settings.fleet import FleetConfig
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.blobs import storage_error
from fleet_protocol.errors import ConfigError

FOLDER = "configurations"
_WRITABLE_BY_OTHERS = 0o022
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


def keep_config(folder: Path, run: str, config: str) -> None:
    """Save the configuration of a run, as JSON, beside the database of a store, readable only by the owner.

    Raises:
        StorageError: it cannot be written.
    """
    write_atomically(_place(folder, run), config.encode())


def kept_config(folder: Path, run: str) -> FleetConfig | None:
    """Read the copy of a run's configuration, with paths adjusted if the folder was moved; None without a copy.

    Raises:
        ConfigError: another user could have written it.
        StorageError: it cannot be read.
    """
    path = _place(folder, run)
    try:
        text = _read_own(path, folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error("read", path, error) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is damaged: it is no text; remove it") from error
    try:
        return _moved(FleetConfig.stored(text), folder.resolve())
    except ConfigError as error:
        raise ConfigError(f"{path} is damaged: {error}; remove it") from error


def is_name(text: str) -> bool:
    """Whether a text can be a part of a path, a topic or a command, and leads nowhere else in any of them."""
    return _NAME.fullmatch(text) is not None


def one_name(kind: str, name: str) -> str:
    """Check a name from the database that becomes part of a path; raise a ConfigError if it could lead elsewhere."""
    if not is_name(name):
        raise ConfigError(f"{kind} {name!r} is not a valid file name; the database was changed")
    return name


def _place(folder: Path, run: str) -> Path:
    return folder / FOLDER / f"{one_name('run', run)}.json"


def _read_own(path: Path, folder: Path) -> str:
    """Read a file that only the owner of the store can have written.

    Raises:
        OSError: it cannot be read, or is a link.
        ConfigError: it belongs to another user, or others can write it.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    with os.fdopen(descriptor, encoding="utf-8") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not _is_ours(status, folder):
            raise ConfigError(f"{path} may have been written by another user; remove it")
        return file.read()


def _is_ours(status: os.stat_result, folder: Path) -> bool:
    if not hasattr(os, "geteuid"):  # Windows
        return True
    user = os.geteuid()
    owner = user or folder.stat().st_uid  # root may manage another user's store
    return status.st_uid in {user, owner} and not status.st_mode & _WRITABLE_BY_OTHERS


def _moved(config: FleetConfig, folder: Path) -> FleetConfig:
    """Adjust a configuration whose store has moved: its files have the same places beside the store, if they exist."""
    before = config.store

    def place(path: Path) -> Path:
        beside = Path(os.path.normpath(folder / os.path.relpath(path, before)))
        return beside if beside.exists() else path

    if before.resolve() == folder:
        return config
    return config.relocated(place).model_copy(update={"store": folder})
