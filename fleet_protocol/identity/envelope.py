"""Signed envelopes of messages: they prove the sender, the topic and the order.

Every message is sent in an envelope; chunks have `fleet_protocol.identity.chunks`. All integers are
big-endian:

    bytes  content
    4      magic "SHE2"
    1      0, or 1 for a farewell, which is signed long before it is published
    8      counter of the sender: session in the upper 32 bits, number in the session in the lower
    2      bytes of the certificate
    ...    certificate, signed by the operator
    64     Ed25519 signature over purpose, topic, all of the above, and the BLAKE3 of the payload
    ...    payload

The topic names fleet and device, so that a message cannot be moved to another topic. The counter
grows, so that a message cannot be repeated.
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
    """The content of a valid envelope, and its signer."""

    payload: bytes
    signer: Certificate


class Signer:
    """Puts messages of a member into envelopes.

    Args:
        enrolment: enrolment of the member.
        session: its number, which is larger than those of all earlier sessions.

    Attributes:
        certificate: certificate of the member; a renewed one has the same key.
    """

    def __init__(self, enrolment: Enrolment, session: int) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(enrolment.key))
        self.certificate = bytes.fromhex(enrolment.certificate)
        # `next` is atomic, and several threads send.
        self._counters = itertools.count((session << _SESSION_BITS) + 1)

    def seal(
        self,
        topic: str,
        payload: bytes,
        *,
        farewell: bool = False,
    ) -> bytes:
        """Return the signed envelope of a message.

        Args:
            topic: topic on which it will be published.
            payload: the message.
            farewell: whether it is published after the member has disconnected.
        """
        certificate = self.certificate
        head = _HEAD.pack(_MAGIC, farewell, next(self._counters), len(certificate))
        signature = self._key.sign(_signed_bytes(topic, head, certificate, payload))
        return b"".join((head, certificate, signature, payload))


class Verifier:
    """Opens envelopes, and refuses forged, repeated and misplaced messages.

    Args:
        enrolment: enrolment of the member that receives the messages.
        replay_guard: counters of the received messages.
        revoked: whether a certificate is revoked.
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
        # Verified once for each certificate: members send the same one with every message.
        self._read_certificate = functools.lru_cache(_KNOWN_CERTIFICATES)(
            lambda data: read_certificate(data, operator)
        )

    def open(
        self,
        topic: str,
        envelope: bytes,
        *,
        retained: bool = False,
    ) -> OpenedMessage:
        """Verify a message.

        Args:
            topic: topic on which it arrived.
            envelope: envelope of the message.
            retained: whether the broker had stored it, so that it may be the newest one again.

        Raises:
            RefusedError: with `FORGED`, `REPLAYED` or `REVOKED`.
        """
        if len(envelope) < _HEAD.size or not envelope.startswith(_MAGIC):
            raise RefusedError(RefusalReason.FORGED, f"a message on {topic} without a signature")
        _, kind, counter, certificate_bytes = _HEAD.unpack_from(envelope)
        certificate_end = _HEAD.size + certificate_bytes
        start = certificate_end + SIGNATURE_BYTES
        # The sizes are bounded before anything is cut out or verified.
        if kind > 1 or certificate_bytes > CERTIFICATE_LIMIT or len(envelope) < start:
            raise RefusedError(
                RefusalReason.FORGED, f"a message on {topic} in a malformed envelope"
            )
        head = envelope[: _HEAD.size]
        certificate = envelope[_HEAD.size : certificate_end]
        signature = envelope[certificate_end:start]
        signed = _signed_bytes(topic, head, certificate, memoryview(envelope)[start:])
        signer = self.verify_signature(certificate, signature, signed, f"a message on {topic}")
        self.check_sender(topic, signer)
        # Last, so that a forged or revoked message cannot advance a counter.
        self._replay_guard.record_message(
            signer, topic, counter, farewell=bool(kind), retained=retained
        )
        return OpenedMessage(envelope[start:], signer)

    def verify_signature(
        self, certificate: bytes, signature: bytes, signed: bytes, what: str
    ) -> Certificate:
        """Return the certificate of a signer.

        Args:
            certificate: signed by the operator.
            signature: signature of the member.
            signed: the bytes that the signature covers.
            what: description for an error.

        Raises:
            RefusedError: with `FORGED`.
        """
        signer = self._read_certificate(certificate)
        try:
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer.key)).verify(signature, signed)
        except InvalidSignature as error:
            raise RefusedError(
                RefusalReason.FORGED,
                f"{what} with a signature that is not from {signer.name}",
            ) from error
        return signer

    def check_sender(self, topic: str, signer: Certificate) -> None:
        """Check that a member may send on a topic, and is still a member.

        Raises:
            RefusedError: with `FORGED` or `REVOKED`.
        """
        if signer.fleet != self._fleet or not _may_send(self._topics.parse(topic), signer):
            raise RefusedError(
                RefusalReason.FORGED,
                f"a message on {topic}, where {signer.role} {signer.name} may not send",
            )
        if self._revoked(signer):
            raise RefusedError(
                RefusalReason.REVOKED,
                f"a message of {signer.role} {signer.name}, which was revoked",
            )
        # Only certificates of devices expire: a board may have no clock to judge a server's.
        if signer.role == "device" and signer.expires and time.time() > signer.expires:
            raise RefusedError(
                RefusalReason.REVOKED,
                f"a message of {signer.name}, whose enrolment has expired",
            )
        if signer.role == "server":
            self._replay_guard.record_server(signer)


def _signed_bytes(
    topic: str, head: bytes, certificate: bytes, payload: bytes | memoryview
) -> bytes:
    """Return the bytes that the signature of an envelope covers."""
    place = topic.encode()
    # The length separates the topic from the header.
    length = struct.pack(">H", len(place))
    return b"".join((_PURPOSE, length, place, head, certificate, chunk_digest(payload)))


def _may_send(topic: Topic | None, signer: Certificate) -> bool:
    """Return whether a member may send on a topic.

    Devices send under their own name, and chunks of updates; the server sends everything else.
    """
    match topic:
        case None:
            # A topic that is not one of this fleet.
            return False
        case DeviceTopic(device, "status" | "profile" | "reply"):
            return signer.role == "device" and signer.name == device
        case UploadTopic():
            return signer.role == "device"
        case _:
            return signer.role == "server"
