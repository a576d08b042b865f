"""Whose a backup is: a statement of all that it holds, signed with one key or several. Ed25519 (RFC 8032).

The inventory lists every member of a backup with its digest and size. A statement names the inventory by its digest, so
that a signature covers every byte. Whose a key is, the statement says in words that its signer chose; what counts is
the key.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import Field, ValidationError

from fleet_protocol.digests import blob_digest
from fleet_protocol.errors import BlobError, RefusedError, visible
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.identity.certificate import Said, issue, read_signed
from fleet_protocol.identity.enrolment import Hex, Key
from fleet_protocol.messages.bounds import Count
from fleet_protocol.messages.values import Digest

INVENTORY = "inventory"
SIGNATURES = "signatures.json"
"""Members of a backup beside those of the store."""

SIGNATURES_LIMIT = 64 * 1024
"""Most bytes of the member with the signatures."""

_SHOWN_DIGITS = 16  # of a key, in a message


class BackupStatement(Said):
    """What a signer says of a backup.

    Attributes:
        signer: who it is, in the signer's own words.
        key: the signer's public key, 32 bytes in hexadecimal.
        taken: when the backup was made, in seconds since 1970.
        inventory: digest of the inventory.
    """

    purpose: ClassVar[bytes] = b"shoal-backup-1\0"

    signer: Annotated[str, Field(max_length=200)]
    key: Key
    taken: Count
    inventory: Digest

    @property
    def shown(self) -> str:
        """Who it is, with the beginning of the key, for a message."""
        return f"{visible(self.signer)} (key {self.key[:_SHOWN_DIGITS]})"


class _Signatures(FrozenModel):
    signatures: Annotated[tuple[Hex, ...], Field(max_length=8)]


@dataclass(frozen=True)
class Signer:
    """Somebody with a key."""

    words: str  # who it is
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
    """The inventory as a file: a line for each member, by name."""
    ordered = sorted(members, key=lambda member: member.name)
    return "".join(f"{member.digest} {member.size} {member.name}\n" for member in ordered).encode()


def read_inventory(data: bytes) -> Mapping[str, Member]:
    """The members of an inventory by name; a BlobError where it is malformed."""
    try:
        lines = [line.split(" ", 2) for line in data.decode().splitlines()]
        members = [Member(name, digest, int(size)) for digest, size, name in lines]
    except ValueError as error:
        raise BlobError(f"the inventory is malformed: {error}") from error
    return {member.name: member for member in members}


def sign(inventory: bytes, signers: Sequence[Signer]) -> bytes:
    """Sign an inventory with every key: the content of the member `SIGNATURES`."""
    taken = int(time.time())
    digest = blob_digest(inventory)
    statements = [
        (signer, BackupStatement(signer=signer.words[:200], key=signer.public, taken=taken, inventory=digest))
        for signer in signers
    ]
    signatures = tuple(issue(statement, signer.key).hex() for signer, statement in statements)
    return _Signatures(signatures=signatures).to_bytes()


def read_statements(data: bytes, inventory: bytes) -> tuple[BackupStatement, ...]:
    """Verify what `sign` wrote, each statement by the key that it names; whose the key is, is not looked at.

    Raises:
        BlobError: it is malformed, a signature is not of that key, or it is of another inventory.
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
        raise BlobError("a signature of it is not of the key that it names") from error
