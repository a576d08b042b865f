"""Masks of a secure sum: key streams that only members who share a secret can make."""

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.identity.sealing import agreed_key, derive_key, new_key, private_key
from fleet_protocol.messages.values import MemberKeys
from fleet_protocol.secure_sum.fixed_point import Words


def check_keys(keys: MemberKeys) -> None:
    """Check that others can agree on a secret with these keys.

    Raises:
        RefusedError: a key would spoil the sum.
    """
    try:
        # The exchange refuses keys that agree on the same secret with everybody.
        for key in keys:
            agreed_key(private_key(new_key()), bytes.fromhex(key), b"")
    except ValueError as error:
        raise RefusedError(
            RefusalReason.UNSUPPORTED,
            f"the keys {', '.join(keys)} are not valid for a key agreement",
        ) from error


def own_mask(
    secret: str,
    place: str,
    size: int,
) -> Words:
    """Return the mask that a member adds to its vector for itself."""
    return key_stream(derive_key(bytes.fromhex(secret), f"shoal sum own {place}".encode()), size)


def pair_key(private: str, public: str, place: str) -> bytes:
    """Return the key of the mask that two members have in common."""
    purpose = f"shoal sum pair {place}".encode()
    return agreed_key(private_key(private), bytes.fromhex(public), purpose)


def pair_mask(
    member: str,
    partner: str,
    key: bytes,
    size: int,
) -> Words:
    """Return what a member adds for a partner; the partner adds the opposite."""
    mask = key_stream(key, size)
    return mask if member < partner else -mask


def key_stream(key: bytes, size: int) -> Words:
    """Return the key stream of a cipher as integers.

    A key is used for one stream only, so its nonce is zero.
    """
    stream = ChaCha20Poly1305(key).encrypt(bytes(12), bytes(4 * size), None)
    # Little-endian on every machine, or masks of two boards would not cancel.
    return np.frombuffer(stream, "<u4", size).astype(np.uint32)
