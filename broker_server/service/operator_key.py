"""The operator's key, which signs members and releases, and the expiry of what it signs."""

import datetime as dt
import time
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from broker_server.store.key_files import load_private_key
from fleet_protocol.errors import ConfigError

MOST_DAYS = 36_500
_DAY_SECONDS = 24 * 3600
_WRITTEN_ON = dt.date(2026, 11, 28)
"""A correctly set clock is not before this day; see the steps of a release."""


def read_operator_key(folder: Path) -> Ed25519PrivateKey:
    """Return the operator's key from a fleet's folder.

    Raises:
        ConfigError: it is missing, has a passphrase, or is of another kind.
    """
    path = folder / "operator.pem"
    try:
        key = load_private_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the operator's key {path}, which is needed to enrol, renew and "
            f"revoke: {error}"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} is not an Ed25519 key")
    return key


def expiry_of(days: int) -> int:
    """Return the expiry of something that is signed now, in seconds since 1970.

    Args:
        days: until then; 0 for never, for which it returns 0 seconds.

    Raises:
        ConfigError: `days` is too large, or the clock is not set.
    """
    # An expiry from a wrong clock would be wrong everywhere.
    require_clock()
    if not 0 <= days <= MOST_DAYS:
        raise ConfigError(
            f"an enrolment expires after 1 to {MOST_DAYS} days, or never with 0; not after {days}"
        )
    return int(time.time()) + days * _DAY_SECONDS if days else 0


def require_clock() -> None:
    """Refuse to create keys and certificates while the clock of this machine is not set.

    They would have expired before any other machine checks them, and their numbers would be below
    those of later ones.

    Raises:
        ConfigError: the clock shows a day before this program was written.
    """
    now = dt.datetime.fromtimestamp(time.time(), dt.timezone.utc)
    if now.date() < _WRITTEN_ON:
        raise ConfigError(
            f"the clock of this machine shows {now:%Y-%m-%d}, before this program was written: set "
            "it, for example by `sudo timedatectl set-ntp true`, and try again"
        )
