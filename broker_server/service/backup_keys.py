"""The keys that sign a backup and that a restore trusts: the operator's, and the user's."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from broker_server.store.backup_signature import Signer
from broker_server.store.user_key import read_key, user_key_path, user_signer
from fleet_protocol.errors import ConfigError, StorageError
from fleet_protocol.identity.enrolment import read_enrolment


def signers(store: Path, folder: Path | None = None) -> tuple[Signer, ...]:
    """Return the signers of a backup: the operator with a key in the fleet's folder, and the user.

    Args:
        store: folder of the store, inside the fleet's folder.
        folder: the fleet's folder, if the store is not in it.

    Raises:
        ConfigError: there is no operator's key, and the user's key cannot be read.
        StorageError: there is no operator's key, and the user's key cannot be created.
    """
    operators = tuple(_operators(store, folder))
    try:
        return (*operators, user_signer())
    except (ConfigError, StorageError):
        if not operators:
            raise
        return operators  # a service has no home folder, but the fleet's folder has a key


def known_keys(store: Path, folder: Path | None = None) -> Mapping[str, str]:
    """Return the trusted public keys in hexadecimal, with their owners.

    The arguments are those of `signers`.

    The user's own key is not created. The operator's public key is enough, because the private key
    may be kept elsewhere.
    """
    keys: dict[str, str] = {}
    for place in _fleet_folders(store, folder):
        # A folder without a server's enrolment is not a fleet's.
        with suppress(ConfigError):
            enrolment = read_enrolment(place / "server.enrolment")
            keys[enrolment.operator] = _operator_of(place)
    with suppress(ConfigError):
        # Looked for, because a restore must not create a key.
        if user_key_path().exists():
            own = user_signer()
            keys[own.public] = own.words
    return keys


def _fleet_folders(store: Path, folder: Path | None) -> tuple[Path, ...]:
    beside = store.resolve().parent
    # The store of a fleet lies in its folder, unless the user names another.
    return (beside,) if folder is None or folder.resolve() == beside else (beside, folder)


def _operators(store: Path, folder: Path | None) -> Iterator[Signer]:
    """Return the operators whose keys are present; raise a ConfigError if a key cannot be read."""
    for place in _fleet_folders(store, folder):
        path = place / "operator.pem"
        if path.exists():
            yield Signer(_operator_of(place), read_key(path))


def _operator_of(place: Path) -> str:
    """Return a name for the operator of the fleet in a folder."""
    try:
        return f"the operator of fleet {read_enrolment(place / 'server.enrolment').fleet}"
    except ConfigError:
        return "the operator of a fleet"
