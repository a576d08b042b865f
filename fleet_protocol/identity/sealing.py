"""Updates that only the server can read: sealed to its X25519 key before they are cut into chunks and signed.

    bytes  content
    4      magic "SHS1"
    32     X25519 key made for this update alone
    ...    the update under ChaCha20-Poly1305, 16 bytes longer

The key of the cipher is HKDF-SHA256 (RFC 5869) of what the two keys agree on (RFC 7748), bound to both. It serves once,
so the nonce is zero (RFC 8439). What the update is for is authenticated with it: for another task it does not open.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fleet_protocol.errors import RefusalReason, RefusedError

_MAGIC = b"SHS1"
_KEY_BYTES = 32
_NONCE = bytes(12)
OVERHEAD_BYTES = len(_MAGIC) + _KEY_BYTES + 16


class Purpose(NamedTuple):
    """What an update is for: fleet, ids of run, task and device, and the digest of the manifest that it took."""

    fleet: str
    run: str
    round: int
    task: str
    device: str
    artifact_set: str


def new_key() -> str:
    """A private key, 32 bytes in hexadecimal."""
    return X25519PrivateKey.generate().private_bytes_raw().hex()


def public_key(private: str) -> str:
    """What is sealed to for the owner of a private key; both 32 bytes in hexadecimal."""
    return _private(private).public_key().public_bytes_raw().hex()


def _private(key: str) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(bytes.fromhex(key))


def _cipher(shared: bytes, ephemeral: bytes, recipient: bytes) -> ChaCha20Poly1305:
    info = b"shoal-seal-1\0" + ephemeral + recipient
    return ChaCha20Poly1305(HKDF(SHA256(), _KEY_BYTES, salt=None, info=info).derive(shared))


def seal(data: bytes, recipient: str, purpose: Purpose) -> tuple[bytes, bytes]:
    """Seal an update.

    Args:
        data: the update, less than 2 GiB.
        recipient: public key, 32 bytes in hexadecimal.
        purpose: what it is for.

    Returns:
        Its two parts; a board that trains has no room for copies.

    Raises:
        RefusedError: the update is too large.
    """
    key, reader = X25519PrivateKey.generate(), bytes.fromhex(recipient)
    ephemeral = key.public_key().public_bytes_raw()
    cipher = _cipher(key.exchange(X25519PublicKey.from_public_bytes(reader)), ephemeral, reader)
    try:
        return _MAGIC + ephemeral, cipher.encrypt(_NONCE, data, json.dumps(purpose).encode())
    except OverflowError as error:
        text = f"an update of {len(data)} bytes; what is sealed must be below 2 GiB, so take a smaller tier"
        raise RefusedError(RefusalReason.OVERSIZED, text) from error


def unseal(data: bytes, keys: Sequence[str], purpose: Purpose) -> bytes:
    """Open a sealed update.

    Args:
        data: as it came.
        keys: private keys to try, 32 bytes in hexadecimal.
        purpose: what it is for.

    Raises:
        RefusedError: it is not sealed, to none of these keys, for something else, or was changed.
    """
    if not data.startswith(_MAGIC) or len(data) < OVERHEAD_BYTES:
        raise RefusedError(RefusalReason.BAD_SEAL, "an update that is not sealed, as all of this fleet's must be")
    ephemeral, sealed = data[len(_MAGIC) : len(_MAGIC) + _KEY_BYTES], memoryview(data)[len(_MAGIC) + _KEY_BYTES :]
    for key in map(_private, keys):
        try:
            shared = key.exchange(X25519PublicKey.from_public_bytes(ephemeral))
            cipher = _cipher(shared, ephemeral, key.public_key().public_bytes_raw())
            return cipher.decrypt(_NONCE, sealed, json.dumps(purpose).encode())
        except (InvalidTag, ValueError):  # another key's, or one on which nothing can be agreed
            continue
    text = "a sealed update that does not open: it was changed, or is for another task or an older key of the server"
    raise RefusedError(RefusalReason.BAD_SEAL, text)
