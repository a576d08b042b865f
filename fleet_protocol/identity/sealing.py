"""Seals data for one reader, with X25519 (RFC 7748) and ChaCha20-Poly1305 (RFC 8439).

    bytes  content
    4      magic "SHS2"
    32     X25519 key made for this seal
    ...    sealed data, 16 bytes longer

Keys of ciphers are derived from a secret by HKDF-SHA256 (RFC 5869), and bound to their purpose. The
key of a seal is used once, so its nonce is zero. The topic of the data is authenticated with it.
"""

import contextlib
import functools
from collections.abc import Sequence
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import (
    X25519PrivateKey,
    X25519PublicKey,
)
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fleet_protocol.errors import RefusalReason, RefusedError

Cipher = AESGCM | ChaCha20Poly1305
KEY_BYTES = 32
_MAGIC = b"SHS2"
_PURPOSE = b"shoal-seal-2\0"
_NONCE = bytes(12)
_START = len(_MAGIC) + KEY_BYTES


def new_key() -> str:
    """Return a new private key, 32 bytes in hexadecimal."""
    return X25519PrivateKey.generate().private_bytes_raw().hex()


def private_key(key: str) -> X25519PrivateKey:
    """Return the private key of 32 bytes in hexadecimal."""
    return X25519PrivateKey.from_private_bytes(bytes.fromhex(key))


def public_key(private: str) -> str:
    """Return the public key of a private key; both are 32 bytes in hexadecimal."""
    return private_key(private).public_key().public_bytes_raw().hex()


def derive_key(secret: bytes, purpose: bytes) -> bytes:
    """Derive a key of 32 bytes from a secret, for one purpose."""
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=purpose).derive(secret)


@functools.cache
def fast_aes() -> bool:
    """Return whether this processor has instructions for AES.

    Without them ChaCha20-Poly1305 is several times faster.
    """
    with contextlib.suppress(OSError):  # only Linux has this file
        lines = Path("/proc/cpuinfo").read_text("ascii", "replace").splitlines()
        flags = [line for line in lines if line.startswith(("flags", "Features"))]
        return any("aes" in line.split() for line in flags)
    return False


def agreed_key(
    own: X25519PrivateKey,
    other: bytes,
    purpose: bytes,
) -> bytes:
    """Return the key for one purpose of two members who know each other's public keys.

    Raises:
        ValueError: the keys are not valid for a key agreement (RFC 7748, section 6.1).
    """
    return derive_key(own.exchange(X25519PublicKey.from_public_bytes(other)), purpose)


def seal(
    data: bytes,
    recipient: str,
    place: str,
    key: str = "",
) -> bytes:
    """Seal a few bytes.

    Args:
        data: the bytes to seal.
        recipient: public key of the reader, 32 bytes in hexadecimal.
        place: topic on which the seal is sent.
        key: private key of this seal, which gives the same seal again; without one a new key is
            made. A key is used for one seal only.
    """
    own = private_key(key or new_key())
    reader = bytes.fromhex(recipient)
    # The reader needs the public key, so it is sent with the seal.
    public = own.public_key().public_bytes_raw()
    # Both public keys are in the derivation, so the seal is bound to its reader.
    cipher = ChaCha20Poly1305(agreed_key(own, reader, _PURPOSE + public + reader))
    return _MAGIC + public + cipher.encrypt(_NONCE, data, place.encode())


def unseal(
    data: bytes,
    keys: Sequence[str],
    place: str,
) -> bytes:
    """Open a seal with one of some private keys.

    Args:
        data: the seal.
        keys: private keys, 32 bytes in hexadecimal each.
        place: topic on which the seal arrived.

    Raises:
        RefusedError: it is not sealed to one of these keys, is sealed for another place, or was
            changed.
    """
    public = data[len(_MAGIC) : _START]
    sealed = data[_START:]
    # Data of another format is tried with no key.
    candidates = keys if data.startswith(_MAGIC) else ()
    for key in map(private_key, candidates):
        reader = key.public_key().public_bytes_raw()
        # It may be sealed to another key, or have an invalid public key.
        with contextlib.suppress(InvalidTag, ValueError):
            cipher = ChaCha20Poly1305(agreed_key(key, public, _PURPOSE + public + reader))
            return cipher.decrypt(_NONCE, sealed, place.encode())
    raise RefusedError(
        RefusalReason.BAD_SEAL,
        f"data sealed for {place} does not open with this member's keys",
    )
