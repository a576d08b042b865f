"""Signs a statement of a backup's contents with one or more keys, and verifies it.

Ed25519 (RFC 8032).

The inventory lists every member of a backup with its digest and size. A statement holds the digest
of the inventory, so a signature covers every byte. The statement also names its signer, in the
signer's own words; only the key is trusted.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from pydantic import Field, ValidationError

from fleet_protocol.digests import blob_digest
from fleet_protocol.errors import BlobError, RefusedError, visible
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.identity.certificate import SignedStatement, issue, read_signed
from fleet_protocol.identity.enrolment import Hex, Key
from fleet_protocol.messages.bounds import Count
from fleet_protocol.messages.values import Digest

INVENTORY = "inventory"
SIGNATURES = "signatures.json"
"""Members of a backup besides those of the store."""

SIGNATURES_LIMIT = 64 * 1024
"""Greatest size of the member with the signatures, in bytes."""

_MOST_LETTERS = 200  # of a signer's name
_SHOWN_DIGITS = 16  # of a key, shown in messages


class BackupStatement(SignedStatement):
    """A signer's statement about a backup.

    Attributes:
        signer: the signer's name, in the signer's own words.
        key: the signer's public key, 32 bytes in hexadecimal.
        taken: time of the backup, in seconds since 1970.
        inventory: digest of the inventory.
    """

    purpose: ClassVar[bytes] = b"shoal-backup-1\0"

    signer: Annotated[str, Field(max_length=_MOST_LETTERS)]
    key: Key
    taken: Count
    inventory: Digest

    @property
    def shown(self) -> str:
        """The signer's name with the beginning of the key, for messages."""
        return f"{visible(self.signer)} (key {self.key[:_SHOWN_DIGITS]})"


class _Signatures(FrozenModel):
    signatures: Annotated[tuple[Hex, ...], Field(max_length=8)]


@dataclass(frozen=True)
class Signer:
    """A name with its key."""

    words: str  # the signer's name
    key: Ed25519PrivateKey

    @property
    def public(self) -> str:
        """The public key, 32 bytes in hexadecimal."""
        return self.key.public_key().public_bytes_raw().hex()


@dataclass(frozen=True)
class Member:
    """A file of a backup."""

    name: str  # within the store's folder
    digest: str
    size: int  # bytes


def write_inventory(members: Iterable[Member]) -> bytes:
    """Write the inventory as a file: one line for each member, by name."""
    ordered = sorted(members, key=lambda member: member.name)
    return "".join(f"{member.digest} {member.size} {member.name}\n" for member in ordered).encode()


def read_inventory(data: bytes) -> Mapping[str, Member]:
    """Read the members of an inventory by name.

    Raises:
        BlobError: it is malformed.
    """
    members = {}
    try:
        for line in data.decode().splitlines():
            digest, size, name = line.split(" ", 2)
            members[name] = Member(name, digest, int(size))
    except ValueError as error:
        raise BlobError(f"the inventory is malformed: {error}") from error
    return members


def sign(inventory: bytes, signers: Sequence[Signer]) -> bytes:
    """Sign an inventory with every key; return the content of the member `SIGNATURES`."""
    taken = int(time.time())
    digest = blob_digest(inventory)
    signatures = []
    for signer in signers:
        statement = BackupStatement(
            signer=signer.words[:_MOST_LETTERS],
            key=signer.public,
            taken=taken,
            inventory=digest,
        )
        signatures.append(issue(statement, signer.key).hex())
    return _Signatures(signatures=tuple(signatures)).to_bytes()


def read_statements(data: bytes, inventory: bytes) -> tuple[BackupStatement, ...]:
    """Verify the content from `sign`, each statement with the key in it.

    The key's owner is not checked.

    Raises:
        BlobError: it is malformed, a signature does not match its key, or it is for another
            inventory.
    """
    try:
        signatures = _Signatures.model_validate_json(data).signatures
    except ValidationError as error:
        raise BlobError("its signatures are malformed") from error
    digest = blob_digest(inventory)
    statements = tuple(_read_statement(bytes.fromhex(signature)) for signature in signatures)
    if any(statement.inventory != digest for statement in statements):
        raise BlobError("its inventory was changed after it was signed")
    return statements


def _read_statement(signature: bytes) -> BackupStatement:
    try:
        claimed = BackupStatement.model_validate_json(signature[64:])
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(claimed.key))
        return read_signed(BackupStatement, signature, public)
    except (ValidationError, ValueError, RefusedError) as error:
        raise BlobError("one of its signatures does not match its key") from error
