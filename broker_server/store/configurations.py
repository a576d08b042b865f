"""Saves the configurations of runs in files beside the database.

Servers open paths and call functions only if these files name them.

Anyone who can change the database, or supplies a backup or a whole store, could write any path,
address or function into the configuration of a run. So a store keeps a copy of every configuration
with which a run begins or resumes, in ``configurations`` of its folder, readable only by its owner
and signed with the owner's key, which is outside every store. Backups do not include it, and
restores do not create it. The database's configuration only provides numbers and words to display.
"""

import errno
import logging
import os
import re
import stat
from pathlib import Path
from shlex import quote

from pydantic import TypeAdapter, ValidationError

from broker_server.settings.fleet import FleetConfig
from broker_server.store.configuration_seal import read_sealed, seal, seal_problem
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.disk import storage_error
from fleet_protocol.errors import BlobError, ConfigError
from fleet_protocol.foreign_files import open_regular
from fleet_protocol.messages.values import Name
from fleet_protocol.private_folders import WRITABLE_BY_OTHERS, make_private_folder

FOLDER = "configurations"
_LIMIT_BYTES = 1024 * 1024
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_RUN_NAME = TypeAdapter[str](Name)
# Errors of opening a link, or of anything else that does not belong in a store.
_NOT_A_FILE = frozenset({errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.EMLINK})
# Windows has neither of the two flags.
_FOLDER_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
_LOG = logging.getLogger(__name__)


def save_config(folder: Path, run: str, config: str) -> str | None:
    """Save the configuration of a run as JSON beside the database, readable only by its owner.

    Returns:
        None; or why it is not signed, so that no server resumes it, and what to do.

    Raises:
        ConfigError: the run's name is not valid as a file name.
        StorageError: it cannot be written.
    """
    path = folder / FOLDER / _file_name(run)
    # Only the owner may list it, or put files into it.
    make_private_folder(path.parent)
    sealed, reason = seal(folder, run, config)
    write_atomically(path, sealed.to_bytes())
    if reason is None:
        return None
    return (
        f"the configuration of run {run} is saved without a signature: {reason}. A restarted "
        "server resumes the run only from the server's own file; set XDG_CONFIG_HOME to a "
        "folder that this user can write"
    )


def saved_config(folder: Path, run: str) -> FleetConfig | None:
    """Return the saved configuration of a run, as `read_saved_config`.

    If none is valid, log why and return None.
    """
    config = read_saved_config(folder, run)
    if isinstance(config, FleetConfig):
        return config
    _LOG.warning("run %s: %s", run, config)
    return None


def read_saved_config(folder: Path, run: str) -> FleetConfig | str:
    """Read the configuration of a run that this user's server saved, with its present paths.

    Args:
        folder: folder of the store, which may have been moved since.
        run: id of the run.

    Returns:
        The configuration; or why none is valid, in words.

    Raises:
        ConfigError: another user could have written it, it is not a text file, or no server can
            resume with it.
        StorageError: it cannot be read.
    """
    path = folder / FOLDER / _file_name(run)
    try:
        # Read without following links, and checked for its owner, before anything in it is used.
        data = _read_own(path, folder)
    except FileNotFoundError:
        return "no server saved its configuration in this store"
    sealed = read_sealed(data)
    reason = "it is not signed" if sealed is None else seal_problem(folder, run, sealed)
    if sealed is None or reason is not None:
        return f"its saved configuration {path} is not valid: {reason}"
    try:
        # Only the paths are new; the signature covers the text as it was saved.
        return _moved(FleetConfig.stored(sealed.config), folder.resolve())
    except ConfigError as error:
        raise ConfigError(f"{path} is damaged: {error}; remove it") from error


def is_name(text: str) -> bool:
    """Return whether a text is safe as a part of a path, a topic or a command."""
    return _NAME.fullmatch(text) is not None


def is_run_name(run: object) -> bool:
    """Return whether a value of the database can be the id of a run, in messages as in paths."""
    try:
        _RUN_NAME.validate_python(run, strict=True)
    except ValidationError:
        return False
    return True


def require_name(kind: str, name: str) -> str:
    """Check a name from the database that becomes part of a path, and return it.

    Raises:
        ConfigError: it could lead elsewhere.
    """
    if not is_name(name):
        raise ConfigError(f"{kind} {name!r} is not a valid file name; the database was changed")
    return name


def _file_name(run: str) -> str:
    return f"{require_name('run', run)}.json"


def _read_own(path: Path, folder: Path) -> bytes:
    """Read a file that only the owner of the store can have written.

    Raises:
        FileNotFoundError: it does not exist.
        ConfigError: it belongs to another user, others may write it or its folder, or it is not a
            regular text file.
        StorageError: it cannot be read.
    """
    try:
        if os.open not in os.supports_dir_fd:  # Windows
            return _read_checked(path, None, folder)
        # Opened once, so that nobody can exchange the folder between the check and the read.
        descriptor = os.open(path.parent, _FOLDER_FLAGS)
        try:
            _require_own(path.parent, os.fstat(descriptor), folder)
            return _read_checked(path, descriptor, folder)
        finally:
            os.close(descriptor)
    # The caller reports a missing file.
    except FileNotFoundError:
        raise
    except BlobError as error:
        raise ConfigError(f"{error}; remove it") from error
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            raise ConfigError(
                f"{path} is not read: it, or its folder, is a link or not a regular file; remove it"
            ) from error
        raise storage_error("read", path, error) from error


def _read_checked(path: Path, parent: int | None, folder: Path) -> bytes:
    """Read a file, and check it.

    Args:
        path: the file.
        parent: descriptor of its folder, if that is open.
        folder: folder of the store.

    Raises:
        ConfigError: it is too long, is not text, or could have been written by another user.
    """
    # The descriptor is checked, not the path, which could name another file by then.
    with open_regular(path, parent) as file:
        _require_own(path, os.fstat(file.fileno()), folder)
        # One byte more than allowed shows that the file is too long.
        data = file.read(_LIMIT_BYTES + 1)
    if len(data) > _LIMIT_BYTES:
        raise ConfigError(f"{path} is not read: it has more than {_LIMIT_BYTES:,} bytes; remove it")
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is damaged: it is not UTF-8 text; remove it") from error
    return data


def _require_own(path: Path, status: os.stat_result, folder: Path) -> None:
    """Check that only the owner of the store can have written a file or folder.

    Raises:
        ConfigError: another user could have written it.
    """
    if not hasattr(os, "geteuid"):  # Windows
        return
    user = os.geteuid()
    owner = user or folder.stat().st_uid  # root may manage another user's store
    if status.st_uid in {user, owner} and not status.st_mode & WRITABLE_BY_OTHERS:
        return
    remedy = (
        f"remove it, or run `chmod go-w {quote(str(path))}`"
        if stat.S_ISDIR(status.st_mode)
        else "remove it"
    )
    raise ConfigError(f"{path} may have been written by another user; {remedy}")


def _moved(config: FleetConfig, folder: Path) -> FleetConfig:
    """Adjust a configuration whose store has moved.

    Files at the same place relative to the store have moved with it.
    """
    old_folder = config.store
    if old_folder.resolve() == folder:
        return config

    def new_place(path: Path) -> Path:
        moved = Path(os.path.normpath(folder / os.path.relpath(path, old_folder)))
        # A file that was left behind, such as a data set elsewhere, keeps its place.
        return moved if moved.exists() else path

    return config.relocated(new_place).model_copy(update={"store": folder})
