"""The operator's key, which signs members and releases, and the end of what it signs."""

import datetime as dt
import time
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleet_protocol.errors import ConfigError

MOST_DAYS = 36_500
_DAY_SECONDS = 24 * 3600
_WRITTEN_ON = dt.date(2026, 11, 28)
"""No clock that is set shows a day before this one; see the steps of a release."""


def read_operator_key(folder: Path) -> Ed25519PrivateKey:
    """Return the operator's key from a fleet's folder.

    Raises:
        ConfigError: it is not there, has a passphrase, or is of another kind.
    """
    path = folder / "operator.pem"
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, TypeError, ValueError) as error:  # a TypeError for one with a passphrase
        raise ConfigError(
            f"cannot read the operator's key {path}, which enrolling, renewing and revoking need: "
            f"{error}"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} is no Ed25519 key")
    return key


def expiry_of(days: int) -> int:
    """Return when something ends that is signed now, in seconds since 1970.

    Args:
        days: until then; 0 for never, which is 0 seconds.

    Raises:
        ConfigError: there are too many, or the clock is not set.
    """
    require_clock()
    if not 0 <= days <= MOST_DAYS:
        raise ConfigError(
            f"an enrolment ends after 1 to {MOST_DAYS} days, or never with 0; not after {days}"
        )
    return int(time.time()) + days * _DAY_SECONDS if days else 0


def require_clock() -> None:
    """Refuse to make keys and certificates while the clock of this machine is not set.

    They would have ended before any other machine looks at them, and their numbers would be below
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
