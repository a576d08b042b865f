"""Reads private keys in PEM, whose errors are those of one kind."""

from cryptography.exceptions import InternalError, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes


def load_private_key(data: bytes) -> PrivateKeyTypes:
    """Read a private key in PEM that has no passphrase.

    Raises:
        ValueError: it is damaged, has a passphrase, or is of a kind that nobody knows.
    """
    try:
        return serialization.load_pem_private_key(data, None)
    # A TypeError for one with a passphrase, an InternalError for a key that OpenSSL cannot hold.
    except (InternalError, TypeError, UnsupportedAlgorithm) as error:
        reason = str(error).partition(".")[0]
        raise ValueError(reason) from error
