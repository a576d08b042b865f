"""Whose keys sign a backup, and whose backups are restored without a question: the operator's, and the user's own."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from broker_server.store.backup_signature import Signer
from broker_server.store.user_key import read_key, user_key_path, user_signer
from fleet_protocol.errors import ConfigError, StorageError
from fleet_protocol.identity.enrolment import read_enrolment


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
            yield Signer(_operator_of(place), read_key(path))


def _operator_of(place: Path) -> str:
    """The operator of the fleet of a folder, in words."""
    try:
        return f"the operator of fleet {read_enrolment(place / 'server.enrolment').fleet}"
    except ConfigError:
        return "the operator of a fleet"
