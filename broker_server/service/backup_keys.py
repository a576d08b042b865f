"""The keys that sign a backup and that a restore trusts: the operator's, and the user's own."""

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
    """Return the path of the user's own key, in the user's folder for configurations.

    Raises:
        ConfigError: the user has no home folder.
    """
    named = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    try:
        folder = named if named.is_absolute() else Path.home() / ".config"
    except RuntimeError as error:
        raise ConfigError("you have no home folder for the key of your backups; set XDG_CONFIG_HOME") from error
    return folder / _KEY


def user_signer() -> Signer:
    """Read the user's own key, or create it on first use, readable only by the user.

    Raises:
        ConfigError: the file does not hold such a key, or others may read it.
        StorageError: it cannot be created.
    """
    path = user_key_path()
    if not path.exists():
        write_secret(path, pem(Ed25519PrivateKey.generate()), durable=True)
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise ConfigError(f"other users can read the key of your backups: run chmod 600 {path}")
    return Signer(f"{_user()} on {platform.node() or 'a computer'}", _read_key(path))


def signers(store: Path, folder: Path | None = None) -> tuple[Signer, ...]:
    """Return the signers of a backup: the operator whose key is in the fleet's folder, and the user.

    Args:
        store: folder of the store, inside the fleet's folder.
        folder: the fleet's folder, if the store is not in it.

    Raises:
        ConfigError: there is no operator's key, and the user's own key cannot be read.
        StorageError: there is no operator's key, and the user's own key cannot be created.
    """
    found = tuple(_operators(store, folder))
    try:
        return (*found, user_signer())
    except (ConfigError, StorageError):
        if not found:
            raise
        return found  # a service has no home folder, but the fleet's folder has the operator's key


def known_keys(store: Path, folder: Path | None = None) -> Mapping[str, str]:
    """Return the trusted public keys in hexadecimal, with their owners; arguments are those of `signers`.

    The user's own key is not created. The operator's public key is enough, since the private key may be kept elsewhere.
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
    """Return the operators whose keys are present; raise a ConfigError if a key cannot be read."""
    for place in _fleet_folders(store, folder):
        path = place / "operator.pem"
        if path.exists():
            yield Signer(_operator_of(place), _read_key(path))


def _operator_of(place: Path) -> str:
    """Return a name for the operator of the fleet in a folder."""
    try:
        return f"the operator of fleet {read_enrolment(place / 'server.enrolment').fleet}"
    except ConfigError:
        return "the operator of a fleet"


def _read_key(path: Path) -> Ed25519PrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, TypeError, ValueError) as error:  # a TypeError for a key with a passphrase
        raise ConfigError(f"cannot read the key {path}: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} is not an Ed25519 key")
    return key


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the user's number has no name
        return f"user {os.getuid()}"
