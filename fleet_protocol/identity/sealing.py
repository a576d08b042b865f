"""What only its reader opens: X25519 keys (RFC 7748), and ChaCha20-Poly1305 (RFC 8439) under what
two of them agree on.

    bytes  content
    4      magic "SHS2"
    32     X25519 key made for this alone
    ...    what is sealed, 16 bytes longer

Keys of ciphers are HKDF-SHA256 (RFC 5869) of a secret, bound to what they are for. That of a seal
serves once, so its nonce is zero; where it may be said is authenticated with it.
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
    """A private key, 32 bytes in hexadecimal."""
    return X25519PrivateKey.generate().private_bytes_raw().hex()


def private_key(key: str) -> X25519PrivateKey:
    """A private key of 32 bytes in hexadecimal."""
    return X25519PrivateKey.from_private_bytes(bytes.fromhex(key))


def public_key(private: str) -> str:
    """What is sealed to for the owner of a private key; both 32 bytes in hexadecimal."""
    return private_key(private).public_key().public_bytes_raw().hex()


def derive_key(secret: bytes, purpose: bytes) -> bytes:
    """A key of 32 bytes that follows from a secret and serves one purpose."""
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=purpose).derive(secret)


@functools.cache
def fast_aes() -> bool:
    """Whether this processor has instructions for AES, without which ChaCha20-Poly1305 is several
    times faster.
    """
    with contextlib.suppress(OSError):  # elsewhere than on Linux: not known
        lines = Path("/proc/cpuinfo").read_text("ascii", "replace").splitlines()
        return any(
            "aes" in line.split() for line in lines if line.startswith(("flags", "Features"))
        )
    return False


def agreed_key(own: X25519PrivateKey, other: bytes, purpose: bytes) -> bytes:
    """The key for one purpose of two who know each other's public keys.

    A ValueError as of RFC 7748, section 6.1.
    """
    return derive_key(own.exchange(X25519PublicKey.from_public_bytes(other)), purpose)


def seal(data: bytes, recipient: str, place: str) -> bytes:
    """Seal something small to a public key, 32 bytes in hexadecimal, for the topic on which it is
    said.
    """
    own = X25519PrivateKey.generate()
    reader = bytes.fromhex(recipient)
    public = own.public_key().public_bytes_raw()
    return (
        _MAGIC
        + public
        + ChaCha20Poly1305(agreed_key(own, reader, _PURPOSE + public + reader)).encrypt(
            _NONCE, data, place.encode()
        )
    )


def unseal(data: bytes, keys: Sequence[str], place: str) -> bytes:
    """Open what was sealed with one of some private keys, 32 bytes in hexadecimal each, where it
    came on its topic.

    A RefusedError: it is sealed to none of these keys, or for another place, or was changed.
    """
    public = data[len(_MAGIC) : _START]
    sealed = data[_START:]
    for key in map(private_key, keys if data.startswith(_MAGIC) else ()):
        try:
            reader = key.public_key().public_bytes_raw()
            return ChaCha20Poly1305(agreed_key(key, public, _PURPOSE + public + reader)).decrypt(
                _NONCE, sealed, place.encode()
            )
        except (
            InvalidTag,
            ValueError,
        ):  # another key's, or one on which nothing can be agreed_key
            continue
    raise RefusedError(
        RefusalReason.BAD_SEAL,
        f"what was sealed for {place} does not open with the keys that are here",
    )
