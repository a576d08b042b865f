"""Whose keys sign a backup, and whose backups are restored without a question: the operator's, and the user's own."""

import getpass
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from broker_server.service.certificates import pem
from broker_server.store.backup_signature import Signer
from fleet_protocol.errors import ConfigError, StorageError
from fleet_protocol.identity.enrolment import read_enrolment, write_secret

_KEY = Path("shoal", "backup.pem")


def user_key_path() -> Path:
    """Where the user's own key lies: in the folder of configurations.

    Raises:
        ConfigError: the user has no home.
    """
    named = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    try:
        folder = named if named.is_absolute() else Path.home() / ".config"
    except RuntimeError as error:
        raise ConfigError("you have no home folder for the key of your backups; set XDG_CONFIG_HOME") from error
    return folder / _KEY


def user_signer() -> Signer:
    """The user's own key, which is made on first use, for the user alone.

    Raises:
        ConfigError: the file holds no such key, or others may read it.
        StorageError: it cannot be made.
    """
    path = user_key_path()
    if not path.exists():
        write_secret(path, pem(Ed25519PrivateKey.generate()), durable=True)
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise ConfigError(f"others may read the key of your backups: chmod 600 {path}")
    return Signer(f"{_user()} on {platform.node() or 'a computer'}", _read_key(path))


def signers(store: Path, folder: Path | None = None) -> tuple[Signer, ...]:
    """Who signs a backup of a store: the operator whose key lies in the fleet's folder, and the user.

    Args:
        store: folder of the store, which lies in the fleet's folder.
        folder: of the fleet where that is another.

    Raises:
        ConfigError: there is no operator's key, and no key of the user's own can be made or read.
        StorageError: likewise.
    """
    found = tuple(_operators(store, folder))
    try:
        return (*found, user_signer())
    except (ConfigError, StorageError):
        if not found:
            raise
        return found  # a service has no home; its operator is known by the fleet's folder


def known_keys(store: Path, folder: Path | None = None) -> Mapping[str, str]:
    """Public keys whose backups are one's own, in hexadecimal, with whose each is; arguments are those of `signers`.

    A key of the user's own is not made. Of an operator the public key is enough, since the other may be kept elsewhere.
    """
    keys: dict[str, str] = {}
    for place in _fleet_folders(store, folder):
        with suppress(ConfigError):
            enrolment = read_enrolment(place / "server.enrolment")
            keys[enrolment.operator] = _operator_of(place)
    with suppress(ConfigError):
        if user_key_path().exists():
            own = user_signer()
            keys[own.public] = own.words
    return keys


def _fleet_folders(store: Path, folder: Path | None) -> tuple[Path, ...]:
    beside = store.resolve().parent
    return (beside,) if folder is None or folder.resolve() == beside else (beside, folder)


def _operators(store: Path, folder: Path | None) -> Iterator[Signer]:
    """The operators whose keys are there; a ConfigError where one cannot be read."""
    for place in _fleet_folders(store, folder):
        path = place / "operator.pem"
        if path.exists():
            yield Signer(_operator_of(place), _read_key(path))


def _operator_of(place: Path) -> str:
    """The operator of the fleet of a folder, in words."""
    try:
        return f"the operator of fleet {read_enrolment(place / 'server.enrolment').fleet}"
    except ConfigError:
        return "the operator of a fleet"


def _read_key(path: Path) -> Ed25519PrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, TypeError, ValueError) as error:  # a TypeError for one with a passphrase
        raise ConfigError(f"cannot read the key {path}: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} is no Ed25519 key")
    return key


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the number of the user has no name
        return f"user {os.getuid()}"
