"""What the operator of a fleet says of a member: whose key it is and what it may sign. Ed25519 (RFC 8032)."""

from typing import Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import ValidationError

from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.identity.enrolment import Key
from fleet_protocol.messages.bounds import Count
from fleet_protocol.messages.values import Name

SIGNATURE_BYTES = 64
CERTIFICATE_LIMIT = 1024  # bytes, signature included
_PURPOSE = b"shoal-certificate-1\0"


class Certificate(FrozenModel):
    """A member of a fleet.

    Attributes:
        fleet: name of the fleet.
        role: ``server`` speaks for the fleet, a ``device`` for itself.
        name: of the device, or ``server``.
        key: public key, 32 bytes in hexadecimal.
        serial: grows with every certificate the operator issues; of a server's, an older one is refused by whoever
            has seen a newer one.
        expires: seconds since 1970 after which the server takes nothing more; 0 for never.
        sealing: X25519 key to which is sealed what is for it alone, 32 bytes in hexadecimal: of a server updates, of a
            device the key of its group.
    """

    fleet: Name
    role: Literal["server", "device"]
    name: Name
    key: Key
    serial: Count
    expires: Count = 0
    sealing: Key | None = None


def issue(certificate: Certificate, operator: Ed25519PrivateKey) -> bytes:
    """Sign a certificate: the signature, 64 bytes, and what it is of."""
    said = certificate.model_dump_json(exclude_none=True).encode()
    return operator.sign(_PURPOSE + said) + said


def read_certificate(data: bytes, operator: Ed25519PublicKey) -> Certificate:
    """Verify a certificate, as `issue` returned it.

    Raises:
        RefusedError: it is malformed, or another's.
    """
    if not SIGNATURE_BYTES < len(data) <= CERTIFICATE_LIMIT:
        raise RefusedError(RefusalReason.FORGED, f"a certificate of {len(data)} bytes")
    signature, said = data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:]
    try:
        operator.verify(signature, _PURPOSE + said)
        return Certificate.model_validate_json(said)
    except InvalidSignature as error:
        raise RefusedError(RefusalReason.FORGED, "a certificate that this fleet's operator did not sign") from error
    except ValidationError as error:
        raise RefusedError(RefusalReason.FORGED, "a certificate of another version") from error
