"""Creates and reads the user's key, which signs backups and saved configurations.

The key is outside every store.
"""

import getpass
import os
import platform
import secrets
from contextlib import suppress
from pathlib import Path
from shlex import quote

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from broker_server.store.backup_signature import Signer
from broker_server.store.key_files import load_private_key
from fleet_protocol.disk import storage_error
from fleet_protocol.errors import ConfigError
from fleet_protocol.identity.enrolment import write_secret

_KEY = Path("shoal", "backup.pem")


def user_key_path() -> Path:
    """Return the path of the user's own key, in the user's folder of configurations.

    Raises:
        ConfigError: the user has no home folder.
    """
    named = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    try:
        folder = named if named.is_absolute() else Path.home() / ".config"
    except RuntimeError as error:
        raise ConfigError(
            "you have no home folder for your own key; set XDG_CONFIG_HOME"
        ) from error
    return folder / _KEY


def user_signer() -> Signer:
    """Return the user's own key; create it on first use, readable only by the user.

    Raises:
        ConfigError: the file does not contain such a key, or others may read it.
        StorageError: it cannot be created.
    """
    path = user_key_path()
    if not _is_there(path):
        _make(path)
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise ConfigError(f"others can read your key: chmod 600 {quote(str(path))}")
    return Signer(f"{_user()} on {platform.node() or 'a computer'}", read_key(path))


def read_key(path: Path) -> Ed25519PrivateKey:
    """Read a private key in PEM.

    Raises:
        ConfigError: the file does not contain one.
    """
    try:
        key = load_private_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the key {path}: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} is not an Ed25519 key")
    return key


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:  # a home folder that may not be entered
        raise storage_error("read", path, error) from error


def _make(path: Path) -> None:
    """Create the key; if two processes do so at once, the key of the first is used."""
    content = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    write_secret(draft, content, durable=True)
    try:
        with suppress(FileExistsError):
            os.link(draft, path)
    except OSError:  # a file system without links
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the user's number has no name
        return f"user {os.getuid()}"
