"""Envelopes of chunks: one signature serves many chunks, and only their readers can open them.

All integers are big-endian:

    bytes  content
    4      magic "SHK1"
    1      kind of the claim that the sender signs: 1 a list, 2 a key, 3 a key for AES-256-GCM
    2, 2   bytes of the certificate, and of the claim
    4      number of the chunk in the list, or under the key
    ...    certificate, signed by the operator
    ...    claim. A list: epoch of the group's key (4; 0 if nothing is sealed), salt (16), a
           BLAKE3 for each body. A key: X25519 key that the sender made for this blob (32), and that
           of its reader, the server (32)
    64     Ed25519 signature over purpose, the topic without its last level, and all of the above
           without the number
    ...    body: the frame of the chunk; sealed, it is under the cipher, with the topic

To devices, the server signs a list of the chunks that it sends, a window at a time, so that no
member can send in its place. To the server, the device signs a key for its update: everything that
opens under the key agreed from this key and the server's comes from the device. So a signature is
verified once for many chunks, every chunk can be verified separately, and chunks need no digests.
"""

import functools
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from fleet_protocol.digests import chunk_digest
from fleet_protocol.errors import RefusalReason, RefusedError, TransportError
from fleet_protocol.identity.certificate import (
    CERTIFICATE_LIMIT,
    SIGNATURE_BYTES,
    Certificate,
)
from fleet_protocol.identity.enrolment import Enrolment
from fleet_protocol.identity.envelope import OpenedMessage, Verifier
from fleet_protocol.identity.group import Group, KnownKeys
from fleet_protocol.identity.sealing import (
    KEY_BYTES,
    Cipher,
    agreed_key,
    derive_key,
    fast_aes,
    private_key,
)

_MAGIC = b"SHK1"
_PURPOSE = b"shoal-chunks-1\0"
# Magic, kind, bytes of certificate and claim, number.
_START = struct.Struct(">4sBHHI")
_LIST = 1
_KEY = 2
_KEY_AES = 3
# The kind names the cipher, so a reader follows the choice of the sender.
_CIPHERS: Mapping[int, type[Cipher]] = MappingProxyType({_KEY: ChaCha20Poly1305, _KEY_AES: AESGCM})
# Epoch of the group's key, and salt.
_GROUP = struct.Struct(">I16s")
_SALT_BYTES = 16
_DIGEST_BYTES = 32
_CLAIM_LIMIT = 4096
# Heads of the chunks that are arriving: one for each update, or for each window of a blob.
_KNOWN_HEADS = 1024


class MissingKeyError(RefusedError):
    """A chunk is sealed under a key that has not arrived yet."""


class _Head(NamedTuple):
    """A verified certificate and claim, which many chunks share."""

    signer: Certificate
    digests: bytes | None  # of the bodies, by number; None where the cipher proves the sender
    cipher: Cipher | None


@dataclass(frozen=True)
class _Stream:
    """The key under which a device seals the chunks of one update to the server."""

    place: str
    server_key: str
    kind: int
    head: bytes  # certificate, claim and signature
    cipher: Cipher


def shared_topic(topic: str) -> str:
    """Return the part of a topic that all chunks of a blob or update share."""
    return topic.rpartition("/")[0]


class ChunkSigner:
    """Puts chunks of a member into envelopes.

    Args:
        enrolment: enrolment of the member.
        keys: keys of others that it has received.

    Attributes:
        certificate: certificate of the member; a renewed one has the same key.
    """

    def __init__(self, enrolment: Enrolment, keys: KnownKeys) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(enrolment.key))
        self.certificate = bytes.fromhex(enrolment.certificate)
        self._keys = keys
        # The board chooses the cipher, because a server is fast with either.
        self._stream_kind = _KEY_AES if fast_aes() else _KEY
        self._stream: _Stream | None = None
        self._number = 0

    def sign_list(
        self, place: str, chunks: Sequence[tuple[str, bytes]], group: Group | None
    ) -> Iterator[bytes]:
        """Sign a list of chunks, and yield their envelopes.

        Args:
            place: the part of the topic that the chunks share.
            chunks: topic and frame of each.
            group: devices that may read them; None for everybody.
        """
        # A group's key seals many lists: the salt makes a key of this list's own, so nonces may
        # start at 0.
        salt = os.urandom(_SALT_BYTES)
        bodies = [frame for _, frame in chunks]
        if group is not None:
            cipher = _group_cipher(group.key, salt, place)  # of this list only, because of the salt
            for number, (topic, frame) in enumerate(chunks):
                bodies[number] = cipher.encrypt(_nonce(number), frame, topic.encode())
        epoch = 0 if group is None else group.epoch
        # The list is signed over the sealed bodies: a chunk is verified before it is opened.
        claim = _GROUP.pack(epoch, salt) + b"".join(map(chunk_digest, bodies))
        head = self._sign_head(place, _LIST, claim)
        # All envelopes repeat the head, so each of them can be verified by itself.
        for number, body in enumerate(bodies):
            yield b"".join((_pack_start(_LIST, head, len(claim), number), head, body))

    def seal_to_server(self, topic: str, frame: bytes) -> bytes:
        """Return the envelope of a chunk that is sealed to the server.

        A server without a key gets a signed chunk.

        Raises:
            TransportError: no message from the server has arrived yet.
        """
        place = shared_topic(topic)
        server_key = self._keys.server_key
        if server_key is None:
            raise TransportError(
                "no message from the server has arrived yet, so nothing can be sealed to "
                "it; it sends its request again"
            )
        # An empty key: this server does not seal.
        if not server_key:
            return next(self.sign_list(place, ((topic, frame),), None))
        stream = self._stream
        # Another update, or a server with a new key, needs another stream.
        if stream is None or (stream.place, stream.server_key) != (place, server_key):
            stream = self._open_stream(place, server_key)
            self._stream = stream
            self._number = 0
        self._number += 1  # each nonce of a key is used once
        body = stream.cipher.encrypt(_nonce(self._number), frame, topic.encode())
        # The claim of a stream has two keys.
        start = _pack_start(stream.kind, stream.head, 2 * KEY_BYTES, self._number)
        return b"".join((start, stream.head, body))

    def _open_stream(self, place: str, server_key: str) -> _Stream:
        # A new key for each update: a key that leaks later does not open earlier updates.
        own = X25519PrivateKey.generate()
        reader = bytes.fromhex(server_key)
        # Both keys are in the claim, so that the signature binds them to each other.
        claim = own.public_key().public_bytes_raw() + reader
        kind = self._stream_kind
        cipher = _stream_cipher(
            kind,
            own,
            reader,
            claim,
            place,
        )
        return _Stream(
            place,
            server_key,
            kind,
            self._sign_head(place, kind, claim),
            cipher,
        )

    def _sign_head(
        self,
        place: str,
        kind: int,
        claim: bytes,
    ) -> bytes:
        signature = self._key.sign(_signed_bytes(place, kind, self.certificate, claim))
        return self.certificate + claim + signature


class ChunkVerifier:
    """Opens chunks, and refuses forged, misplaced and wrongly sealed ones.

    Args:
        enrolment: enrolment of the member that receives the chunks.
        verifier: verifier of signatures and senders.
        keys: keys of others that the member has received.
    """

    def __init__(
        self,
        enrolment: Enrolment,
        verifier: Verifier,
        keys: KnownKeys,
    ) -> None:
        self._verifier = verifier
        self._keys = keys
        self._own_keys: dict[bytes, X25519PrivateKey] = {}
        if enrolment.role == "server":
            # A server that was renewed still opens what was sealed to its earlier keys.
            for key in map(private_key, enrolment.sealing):
                self._own_keys[key.public_key().public_bytes_raw()] = key
        # The cache belongs to this object, and so ends with it.
        self._heads = functools.lru_cache(_KNOWN_HEADS)(self._verify_head)

    def open(self, topic: str, envelope: bytes) -> OpenedMessage:
        """Verify a chunk, and return its frame.

        Raises:
            MissingKeyError: the key of its group has not arrived yet.
            RefusedError: with `FORGED`, `REVOKED` or `BAD_SEAL`.
        """
        forged = (RefusalReason.FORGED, f"a chunk on {topic} without a signature")
        if len(envelope) < _START.size or not envelope.startswith(_MAGIC):
            raise RefusedError(*forged)
        _, kind, certificate_bytes, claim_bytes, number = _START.unpack_from(envelope)
        body_start = _START.size + certificate_bytes + claim_bytes + SIGNATURE_BYTES
        is_too_large = certificate_bytes > CERTIFICATE_LIMIT or claim_bytes > _CLAIM_LIMIT
        if is_too_large or len(envelope) < body_start:
            raise RefusedError(*forged)
        head_data = envelope[_START.size : body_start]
        # By place, too: a head that was signed for one topic does not verify on another.
        head = self._heads(shared_topic(topic), kind, certificate_bytes, head_data)
        # The head is cached, but the sender may have been revoked since.
        self._verifier.check_sender(topic, head.signer)
        self._keys.record_signer(head.signer)
        body = memoryview(envelope)[body_start:]
        # A number beyond the list gives an empty slice, which equals no digest.
        place = slice(_DIGEST_BYTES * number, _DIGEST_BYTES * (number + 1))
        if head.digests is not None and chunk_digest(body) != head.digests[place]:
            raise RefusedError(
                RefusalReason.FORGED,
                f"a chunk on {topic} that is not in the list of {head.signer.name}",
            )
        if head.cipher is None:
            return OpenedMessage(bytes(body), head.signer)
        try:
            # The topic is authenticated, so a chunk cannot be moved to another index.
            frame = head.cipher.decrypt(_nonce(number), body, topic.encode())
        except InvalidTag as error:
            raise RefusedError(
                RefusalReason.FORGED,
                f"a chunk on {topic} that was changed after {head.signer.name} had sealed it",
            ) from error
        return OpenedMessage(frame, head.signer)

    def _verify_head(
        self,
        place: str,
        kind: int,
        certificate_bytes: int,
        data: bytes,
    ) -> _Head:
        """Verify what many chunks share: certificate, claim and signature."""
        certificate = data[:certificate_bytes]
        claim = data[certificate_bytes:-SIGNATURE_BYTES]
        signature = data[-SIGNATURE_BYTES:]
        signed = _signed_bytes(place, kind, certificate, claim)
        signer = self._verifier.verify_signature(
            certificate, signature, signed, f"chunks on {place}"
        )
        # A claim of a list that is too short falls through to the refusal below.
        if kind == _LIST and len(claim) >= _GROUP.size:
            epoch, salt = _GROUP.unpack_from(claim)
            return _Head(signer, claim[_GROUP.size :], self._list_cipher(place, epoch, salt))
        sender_key = claim[:KEY_BYTES]
        reader_key = claim[KEY_BYTES:]
        own = self._own_keys.get(reader_key)
        if kind not in _CIPHERS or len(claim) != 2 * KEY_BYTES or own is None:
            raise _bad_seal(
                place,
                f"sealed by {signer.name} to a key that this member does not have: an older "
                "one, or another member's",
            )
        try:
            cipher = _stream_cipher(
                kind,
                own,
                sender_key,
                claim,
                place,
            )
        except ValueError as error:  # the keys are not valid for a key agreement
            raise _bad_seal(place, "under no key at all") from error
        return _Head(signer, None, cipher)

    def _list_cipher(
        self,
        place: str,
        epoch: int,
        salt: bytes,
    ) -> ChaCha20Poly1305 | None:
        """Return the cipher of a list of chunks; None if nothing is sealed."""
        # Only a server has own keys here; it accepts no chunk that others could read.
        if not epoch and self._own_keys:
            raise _bad_seal(place, "that are not sealed, although all chunks of this fleet must be")
        # Epoch 0 has no key: such chunks are for everybody.
        key = self._keys.group_key(epoch)
        if epoch and key is None:
            raise MissingKeyError(
                RefusalReason.BAD_SEAL,
                f"chunks on {place} under key {epoch} of the fleet, which this member has "
                "not received",
            )
        return None if key is None else _group_cipher(key, salt, place)


def _bad_seal(place: str, why: str) -> RefusedError:
    return RefusedError(RefusalReason.BAD_SEAL, f"chunks on {place} {why}")


def _pack_start(
    kind: int,
    head: bytes,
    claim_bytes: int,
    number: int,
) -> bytes:
    certificate_bytes = len(head) - claim_bytes - SIGNATURE_BYTES
    return _START.pack(
        _MAGIC,
        kind,
        certificate_bytes,
        claim_bytes,
        number,
    )


def _signed_bytes(
    place: str,
    kind: int,
    certificate: bytes,
    claim: bytes,
) -> bytes:
    """Return the bytes that the signature of a head covers."""
    topic = place.encode()
    # Sizes, so that bytes cannot move from one field to the next.
    sizes = struct.pack(
        ">BHHH",
        kind,
        len(topic),
        len(certificate),
        len(claim),
    )
    return b"".join((_PURPOSE, sizes, topic, certificate, claim))


def _group_cipher(
    key: bytes,
    salt: bytes,
    place: str,
) -> ChaCha20Poly1305:
    # The place is part of the key, so a list cannot be moved to another topic.
    return ChaCha20Poly1305(derive_key(key, b"shoal-group-1\0" + salt + place.encode()))


def _stream_cipher(
    kind: int, own: X25519PrivateKey, other: bytes, claim: bytes, place: str
) -> Cipher:
    # Each kind derives another key, so one key is never used with two ciphers.
    purpose = b"shoal-stream-%d\0" % (kind - _LIST) + claim + place.encode()
    return _CIPHERS[kind](agreed_key(own, other, purpose))


def _nonce(number: int) -> bytes:
    # Twelve bytes, as both ciphers take.
    return number.to_bytes(12, "big")
