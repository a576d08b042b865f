"""The envelope of an enrolled fleet: who says it, where, as which of his messages, and a signature
over all of that.

Every message of every kind travels in one but chunks, which have `fleet_protocol.identity.chunks`.
All integers are big-endian:

    bytes  content
    4      magic "SHE2"
    1      0, or 1 for a farewell, which is signed long before it is published
    8      counter of the sender: session in the upper 32 bits, number in the session in the lower
    2      bytes of the certificate
    ...    certificate, signed by the operator
    64     Ed25519 signature over purpose, topic, all of the above, and the BLAKE3 digest of the payload
    ...    payload

The topic names fleet and device, so nothing can be moved elsewhere; the counter grows, so nothing
can be said again.
"""

import functools
import itertools
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from fleet_protocol.digests import chunk_digest
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.identity.certificate import (
    CERTIFICATE_LIMIT,
    SIGNATURE_BYTES,
    Certificate,
    read_certificate,
)
from fleet_protocol.identity.enrolment import Enrolment
from fleet_protocol.identity.replay_guard import ReplayGuard
from fleet_protocol.topics import DeviceTopic, Topic, Topics, UploadTopic

_MAGIC = b"SHE2"
_PURPOSE = b"shoal-envelope-2\0"
_HEAD = struct.Struct(">4sBQH")
_SESSION_BITS = 32
_KNOWN_CERTIFICATES = 4096


@dataclass(frozen=True)
class OpenedMessage:
    """What was said in an envelope that is in order, and by whom."""

    payload: bytes
    signer: Certificate


def _signed(topic: str, head: bytes, certificate: bytes, payload: bytes | memoryview) -> bytes:
    place = topic.encode()
    return b"".join(
        (
            _PURPOSE,
            struct.pack(">H", len(place)),
            place,
            head,
            certificate,
            chunk_digest(payload),
        )
    )


class Signer:
    """Puts what a member says into envelopes, in a session whose number is larger than any before."""

    def __init__(self, enrolment: Enrolment, session: int) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(enrolment.key))
        self.certificate = bytes.fromhex(enrolment.certificate)  # may be renewed, with the same key
        self._counters = itertools.count(
            (session << _SESSION_BITS) + 1
        )  # `next` is atomic: workers send, too

    def seal(self, topic: str, payload: bytes, *, farewell: bool = False) -> bytes:
        """Sign a message; a farewell is published when the member has gone."""
        certificate = self.certificate
        head = _HEAD.pack(_MAGIC, farewell, next(self._counters), len(certificate))
        return b"".join(
            (
                head,
                certificate,
                self._key.sign(_signed(topic, head, certificate, payload)),
                payload,
            )
        )


class Verifier:
    """Opens envelopes, and refuses whatever is not from who may say it there, or was said before.

    It notes the counters it has seen in `marks`.
    """

    def __init__(
        self,
        enrolment: Enrolment,
        replay_guard: ReplayGuard,
        revoked: Callable[[Certificate], bool] = lambda _: False,
    ) -> None:
        self._fleet = enrolment.fleet
        self._topics = Topics(enrolment.fleet)
        self._replay_guard = replay_guard
        self._revoked = revoked
        operator = Ed25519PublicKey.from_public_bytes(bytes.fromhex(enrolment.operator))
        self._certified = functools.lru_cache(_KNOWN_CERTIFICATES)(
            lambda data: read_certificate(data, operator)
        )

    def open(self, topic: str, envelope: bytes, *, retained: bool = False) -> OpenedMessage:
        """Verify a message; one that the broker had retained may be the last one again.

        A RefusedError is `FORGED`, `REPLAYED` or `REVOKED`.
        """
        if len(envelope) < _HEAD.size or not envelope.startswith(_MAGIC):
            raise RefusedError(RefusalReason.FORGED, f"a message on {topic} that nobody has signed")
        _, kind, counter, length = _HEAD.unpack_from(envelope)
        start = _HEAD.size + length + SIGNATURE_BYTES
        if kind > 1 or length > CERTIFICATE_LIMIT or len(envelope) < start:
            raise RefusedError(RefusalReason.FORGED, f"a message on {topic} in a broken envelope")
        certificate = envelope[_HEAD.size : _HEAD.size + length]
        signed = _signed(topic, envelope[: _HEAD.size], certificate, memoryview(envelope)[start:])
        signer = self.verify_signature(
            certificate,
            envelope[start - SIGNATURE_BYTES : start],
            signed,
            f"a message on {topic}",
        )
        self.check(topic, signer)
        self._replay_guard.record_message(
            signer, topic, counter, farewell=bool(kind), retained=retained
        )
        return OpenedMessage(envelope[start:], signer)

    def verify_signature(
        self, certificate: bytes, signature: bytes, signed: bytes, what: str
    ) -> Certificate:
        """Who signed what; `what` says that in the RefusedError, which is `FORGED`."""
        signer = self._certified(certificate)
        try:
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer.key)).verify(signature, signed)
        except InvalidSignature as error:
            raise RefusedError(
                RefusalReason.FORGED,
                f"{what} whose signature is not that of {signer.name}",
            ) from error
        return signer

    def check(self, topic: str, signer: Certificate) -> None:
        """See that a member may speak on a topic, and is one still.

        A RefusedError is `FORGED` or `REVOKED`.
        """
        if signer.fleet != self._fleet or not _may_say(self._topics.parse(topic), signer):
            raise RefusedError(
                RefusalReason.FORGED,
                f"a message on {topic}, where {signer.role} {signer.name} has nothing to say",
            )
        if self._revoked(signer):
            raise RefusedError(
                RefusalReason.REVOKED,
                f"a message of {signer.role} {signer.name}, which was revoked",
            )
        if signer.role == "device" and signer.expires and time.time() > signer.expires:
            raise RefusedError(
                RefusalReason.REVOKED,
                f"a message of {signer.name}, whose enrolment has expired",
            )
        if signer.role == "server":
            self._replay_guard.record_server(signer)


def _may_say(topic: Topic | None, signer: Certificate) -> bool:
    """Devices speak under their own name, and send chunks; everything else is the server's."""
    match topic:
        case None:
            return False
        case DeviceTopic(device, "status" | "profile" | "reply"):
            return signer.role == "device" and signer.name == device
        case UploadTopic():
            return signer.role == "device"
        case _:
            return signer.role == "server"
