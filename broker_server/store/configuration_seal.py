"""Signs and verifies a saved configuration: which user's server saved it, for which run and folder.

A store that a stranger packed has no signature of this user. A signature of this user is valid in
the store in which it was made, even if that has been moved since. It is not valid in a copy of the
store, which could be among a stranger's files.
"""

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, ValidationError

from broker_server.store.schema import DATABASE
from broker_server.store.user_key import user_key_path, user_signer
from fleet_protocol.digests import blob_digest
from fleet_protocol.errors import ConfigError, RefusedError, StorageError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.identity.certificate import SignedStatement, issue, read_signed
from fleet_protocol.identity.enrolment import Hex
from fleet_protocol.messages.values import Digest


class ConfigurationSeal(SignedStatement):
    """The signed statement about a configuration.

    Attributes:
        run: id of the run.
        config: digest of its configuration.
        path: digest of the absolute path of the store.
        files: numbers that the file system gives the store's folder and database; a copy has other
            numbers.
    """

    purpose: ClassVar[bytes] = b"shoal-configuration-1\0"

    run: Annotated[str, Field(max_length=200)]
    config: Digest
    path: Digest
    files: tuple[int, int]


class SealedConfig(FrozenModel):
    """A saved configuration as its file contains it.

    Attributes:
        config: the configuration, as JSON.
        signature: signature of its `ConfigurationSeal`, in hexadecimal; None if the user has no
            key.
    """

    config: str
    signature: Hex | None = None


def seal(folder: Path, run: str, config: str) -> tuple[SealedConfig, str | None]:
    """Sign the configuration of a run with the user's own key.

    Args:
        folder: folder of the store, with its database.
        run: id of the run.
        config: the configuration, as JSON.

    Returns:
        The signed configuration, and None; without a key the unsigned configuration, and why there
        is no key.
    """
    try:
        key = user_signer().key
    # A service without a home folder has no key.
    except (ConfigError, StorageError) as error:
        return SealedConfig(config=config), str(error)
    signature = issue(_seal_of(folder, run, config), key).hex()
    return SealedConfig(config=config, signature=signature), None


def seal_problem(folder: Path, run: str, kept: SealedConfig) -> str | None:
    """Return why a saved configuration is not valid for this user and store; None if it is."""
    if kept.signature is None:
        return "it is not signed, because the server that saved it had no key"
    try:
        # Looked for, because verifying must not create a key.
        if not user_key_path().exists():
            return "somebody else has signed it: you have no key yet"
        public = user_signer().key.public_key()
        statement = read_signed(ConfigurationSeal, bytes.fromhex(kept.signature), public)
    except (ConfigError, StorageError, OSError) as error:
        return f"its signature cannot be verified: {error}"
    except RefusedError:
        return f"it is not signed with your key {user_key_path()}"
    # Computed again from the store as it is here.
    here = _seal_of(folder, run, kept.config)
    if (statement.run, statement.config) != (here.run, here.config):
        return "it was signed for another run, or has been changed since"
    # A moved store keeps its files, and so their numbers; a copy has new ones.
    is_same_folder = here.files == statement.files and all(here.files)
    # The same path is enough where the file system gives no numbers.
    if statement.path != here.path and not is_same_folder:
        return "its store is a copy of the store in which it was signed"
    return None


def read_sealed(text: bytes) -> SealedConfig | None:
    """Read the file of a saved configuration; None for the form of an earlier Shoal, or another."""
    try:
        return SealedConfig.model_validate_json(text)
    except ValidationError:
        return None


def _seal_of(folder: Path, run: str, config: str) -> ConfigurationSeal:
    place = folder.resolve()
    return ConfigurationSeal(
        run=run,
        config=blob_digest(config.encode()),
        path=blob_digest(str(place).encode("utf-8", "surrogateescape")),
        files=(_number_of(place), _number_of(place / DATABASE)),
    )


def _number_of(path: Path) -> int:
    """Return the number that the file system gives a file; 0 if it gives none."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0
