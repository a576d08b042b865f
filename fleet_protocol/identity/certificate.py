"""Statements that the operator of a fleet signs with Ed25519 (RFC 8032).

A certificate states which key a member has, and what it may sign.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal, TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from pydantic import Field, ValidationError

from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.identity.enrolment import Key
from fleet_protocol.messages.bounds import Count
from fleet_protocol.messages.values import Name

SIGNATURE_BYTES = 64
CERTIFICATE_LIMIT = 1024  # bytes, including the signature


class SignedStatement(FrozenModel):
    """A statement of an operator; the purpose prevents the use of a signature for another kind."""

    purpose: ClassVar[bytes]


StatementT = TypeVar("StatementT", bound=SignedStatement)


class Certificate(SignedStatement):
    """A member of a fleet.

    Attributes:
        role: ``server`` speaks for the fleet, a ``device`` for itself.
        name: name of the device, or ``server``.
        key: public key, 32 bytes in hexadecimal.
        serial: grows with every certificate that the operator issues; an older one of the server is
            refused by members that have seen a newer one.
        expires: seconds since 1970 after which the server accepts nothing more; 0 for never.
        sealing: X25519 key, 32 bytes in hexadecimal, to which data only for the member is sealed:
            updates for a server, the key of its group for a device.
    """

    purpose: ClassVar[bytes] = b"shoal-certificate-1\0"

    fleet: Name
    role: Literal["server", "device"]
    name: Name
    key: Key
    serial: Count
    expires: Count = 0
    sealing: Key | None = None

    def outlives(self, other: "Certificate") -> bool:
        """Return whether this certificate ends later than another."""
        # 0 stands for never, so it outlives every date.
        return other.expires != 0 and (self.expires == 0 or self.expires > other.expires)


class Revocations(SignedStatement):
    """The certificates that are revoked: by name, the lowest serial that is still valid.

    The counter grows with every change; a member refuses a list with a lower one than it knows.
    """

    purpose: ClassVar[bytes] = b"shoal-revocations-1\0"

    fleet: Name
    counter: Count = 0
    since: Mapping[Name, Count] = Field(default_factory=dict)


def issue(statement: SignedStatement, operator: Ed25519PrivateKey) -> bytes:
    """Sign a statement, and return the signature of 64 bytes followed by the statement."""
    # The purpose is signed but not sent, so a signature of one kind verifies for no other.
    text = statement.to_bytes()
    return operator.sign(statement.purpose + text) + text


def read_certificate(data: bytes, operator: Ed25519PublicKey) -> Certificate:
    """Verify a certificate that `issue` returned.

    Raises:
        RefusedError: it is malformed, or another operator has signed it.
    """
    # Before the signature, which costs time.
    if not SIGNATURE_BYTES < len(data) <= CERTIFICATE_LIMIT:
        raise RefusedError(RefusalReason.FORGED, f"a certificate of {len(data)} bytes")
    return read_signed(Certificate, data, operator)


def read_signed(
    kind: type[StatementT],
    data: bytes,
    operator: Ed25519PublicKey,
) -> StatementT:
    """Verify a statement of a kind that `issue` returned.

    Raises:
        RefusedError: it is malformed, or another operator has signed it.
    """
    signature = data[:SIGNATURE_BYTES]
    text = data[SIGNATURE_BYTES:]
    name = kind.__name__.lower()
    try:
        # The signature first: nothing of an unsigned text is parsed.
        operator.verify(signature, kind.purpose + text)
        return kind.model_validate_json(text)
    except InvalidSignature as error:
        raise RefusedError(
            RefusalReason.FORGED, f"a {name} that this fleet's operator did not sign"
        ) from error
    except ValidationError as error:
        raise RefusedError(RefusalReason.FORGED, f"a {name} of another version") from error
