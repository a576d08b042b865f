"""With which configuration a server goes on with a run that its store has, or begins another like it.

Whoever can change the database, or hands on a backup, could write any path, address or function into
the configuration of a run. So the server keeps a copy of every configuration that it does a run of,
in ``configurations`` of the store's folder: no backup has it, and no restore makes it. What has no
copy counts as a request does: as numbers for the server's own configuration.
"""

import os
import stat
from pathlib import Path

from pydantic import ValidationError

from broker_server.settings.fleet import FleetConfig
from broker_server.settings.requested import Wanted, granted, in_words
from broker_server.store import RunRecord
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.blobs import storage_error
from fleet_protocol.errors import ConfigError
from fleet_protocol.topics import check_name

FOLDER = "configurations"
_WRITABLE_BY_OTHERS = 0o022
_HOW = (
    "Go on with it by `shoal run --config FILE` or `shoal up --config FILE`, where FILE has the settings of the run, or"
    " end it with `shoal stop`"
)


def keep_config(folder: Path, run: str, config: str) -> None:
    """Keep the configuration of a run, as JSON, beside the database of a store, for the owner alone.

    Raises:
        StorageError: it cannot be written.
    """
    write_atomically(_place(folder, run), config.encode())


def kept_config(folder: Path, run: str) -> FleetConfig | None:
    """The copy of a run's configuration, with its paths as they are now where the folder was moved; None without one.

    Raises:
        ConfigError: somebody else could have written it.
        StorageError: it cannot be read.
    """
    path = _place(folder, run)
    try:
        text = _read_own(path, folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error("read", path, error) from error
    try:
        return _moved(FleetConfig.stored(text), folder.resolve())
    except (ConfigError, ValidationError) as error:
        raise ConfigError(f"{path} is damaged: {error}. Remove it, and {_HOW[0].lower()}{_HOW[1:]}") from error


def trusted_config(folder: Path, record: RunRecord, own: FleetConfig | None) -> FleetConfig:
    """The configuration with which a stored run may be gone on with, or begun again.

    Args:
        folder: of the store.
        record: the run.
        own: the server's own configuration, None for none.

    Raises:
        ConfigError: there is no copy, and the store's says what the server's own does not; the message names it.
    """
    kept = kept_config(folder, record.id)
    if kept is not None:
        return kept
    missing = f"run {record.id} is held, as no configuration of it was kept that this server took itself"
    if own is None:
        raise ConfigError(f"{missing}, and it has none of its own. {_HOW}")
    try:
        return granted(own, Wanted.of(FleetConfig.stored(record.config)))
    except ConfigError as error:
        raise ConfigError(f"{missing}, and of the one in the store is said: {error}. {_HOW}") from error


def what_differs(config: FleetConfig, stored: str) -> str:
    """The settings in which a configuration is other than a stored one, in words; empty for none."""
    try:
        return in_words(config.other_than(stored))
    except ConfigError as error:
        return str(error)


def _place(folder: Path, run: str) -> Path:
    return folder / FOLDER / f"{check_name('run', run)}.json"


def _read_own(path: Path, folder: Path) -> str:
    """Read a file that nobody but the owner of the store can have written.

    Raises:
        OSError: it cannot be read, or is a link.
        ConfigError: it is another's, or others may write it.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    with os.fdopen(descriptor, encoding="utf-8") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not _is_ours(status, folder):
            raise ConfigError(f"{path} may have been written by another user; remove it. {_HOW}")
        return file.read()


def _is_ours(status: os.stat_result, folder: Path) -> bool:
    if not hasattr(os, "geteuid"):  # Windows
        return True
    user = os.geteuid()
    owner = user or folder.stat().st_uid  # root may look after another's store
    return status.st_uid in {user, owner} and not status.st_mode & _WRITABLE_BY_OTHERS


def _moved(config: FleetConfig, folder: Path) -> FleetConfig:
    """A configuration whose store was in another folder: what lay beside it lies beside it still, if it is there."""
    before = config.store

    def place(path: Path) -> Path:
        beside = Path(os.path.normpath(folder / os.path.relpath(path, before)))
        return beside if beside.exists() else path

    here = folder.resolve()
    if before.resolve() == here:
        return config
    return config.relocated(place).model_copy(update={"store": folder})
