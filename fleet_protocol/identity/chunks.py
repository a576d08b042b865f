"""Envelopes of chunks: what is signed serves many of them, and nobody reads them but whom they are
for.

All integers are big-endian:

    bytes  content
    4      magic "SHK1"
    1      what the sender signs: 1 a list, 2 a key, 3 a key for AES-256-GCM
    2, 2   bytes of the certificate, and of what is signed
    4      number of the chunk in the list, or under the key
    ...    certificate, signed by the operator
    ...    a list: epoch of the group's key (4; 0 where nothing is sealed), salt (16), a BLAKE3 for each body;
           a key: X25519 key that the sender made for this blob (32), and that of its reader, the
               server (32)
    64     Ed25519 signature over purpose, the topic but for its last level, and all of the above but for the number
    ...    body: the frame of the chunk, under ChaCha20-Poly1305, or that, with the topic where it is sealed

Down, the server signs what it sends, a window at a time, so that no member says anything in its
place. Up, the device signs a key for its update: what opens under the key that this and the
server's agree on comes from the device. So a signature is verified once for many chunks, each of
them stands for itself, and chunks need no digests of their own.
"""

import functools
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
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
_START = struct.Struct(">4sBHHI")
_LIST = 1
_KEY = 2
_KEY_AES = 3
_CIPHERS: Mapping[int, type[Cipher]] = MappingProxyType({_KEY: ChaCha20Poly1305, _KEY_AES: AESGCM})
_GROUP = struct.Struct(">I16s")
_DIGEST_BYTES = 32
_CLAIM_LIMIT = 4096
_KNOWN_HEADS = 1024


class MissingKeyError(RefusedError):
    """A chunk is sealed under a key that is still on its way."""


class _Head(NamedTuple):
    signer: Certificate
    digests: bytes | None  # of the bodies, by number; None where the cipher proves who sent them
    cipher: Cipher | None


def shared_topic(topic: str) -> str:
    """What the chunks of one blob or update have in common."""
    return topic.rpartition("/")[0]


def _signed(place: str, what: int, certificate: bytes, claim: bytes) -> bytes:
    sizes = struct.pack(">BHHH", what, len(place.encode()), len(certificate), len(claim))
    return b"".join((_PURPOSE, sizes, place.encode(), certificate, claim))


def _group_cipher(key: bytes, salt: bytes, place: str) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(derive_key(key, b"shoal-group-1\0" + salt + place.encode()))


def _stream_cipher(
    what: int, own: X25519PrivateKey, other: bytes, claim: bytes, place: str
) -> Cipher:
    return _CIPHERS[what](
        agreed_key(own, other, b"shoal-stream-%d\0" % (what - _LIST) + claim + place.encode())
    )


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "big")


class ChunkSigner:
    """Puts chunks of a member into envelopes, under the keys that it has been told."""

    def __init__(self, enrolment: Enrolment, keys: KnownKeys) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(enrolment.key))
        self.certificate = bytes.fromhex(enrolment.certificate)
        self._keys = keys
        self._what = (
            _KEY_AES if fast_aes() else _KEY
        )  # the board's choice: a server is quick with either
        self._stream: tuple[tuple[str, str], bytes, Cipher] | None = None
        self._number = 0

    def _head(self, place: str, what: int, claim: bytes) -> bytes:
        return (
            self.certificate + claim + self._key.sign(_signed(place, what, self.certificate, claim))
        )

    @staticmethod
    def _start(what: int, claim_bytes: int, number: int, head: bytes) -> bytes:
        return _START.pack(
            _MAGIC, what, len(head) - claim_bytes - SIGNATURE_BYTES, claim_bytes, number
        )

    def sign_list(
        self, place: str, chunks: Sequence[tuple[str, bytes]], group: Group | None
    ) -> Iterator[bytes]:
        """Sign a list of chunks, by topic and frame, whose topics have a place in common.

        No group is everybody.
        """
        salt = os.urandom(16)
        bodies = [frame for _, frame in chunks]
        if group is not None:
            cipher = _group_cipher(group.key, salt, place)  # of this list alone
            bodies = [
                cipher.encrypt(_nonce(i), frame, topic.encode())
                for i, (topic, frame) in enumerate(chunks)
            ]
        claim = _GROUP.pack(0 if group is None else group.epoch, salt) + b"".join(
            map(chunk_digest, bodies)
        )
        head = self._head(place, _LIST, claim)
        for number, body in enumerate(bodies):
            yield b"".join((self._start(_LIST, len(claim), number, head), head, body))

    def seal_to_server(self, topic: str, frame: bytes) -> bytes:
        """Seal the frame of a chunk to the server.

        A TransportError where that was never heard, and told no key.
        """
        place = shared_topic(topic)
        server = self._keys.server_key
        if server is None:
            raise TransportError(
                "the server was not heard yet, so nothing can be sealed to it; it asks again"
            )
        if not server:
            return next(self.sign_list(place, ((topic, frame),), None))
        if self._stream is None or self._stream[0] != (place, server):
            own = X25519PrivateKey.generate()
            claim = own.public_key().public_bytes_raw() + bytes.fromhex(server)
            cipher = _stream_cipher(self._what, own, bytes.fromhex(server), claim, place)
            self._stream = ((place, server), self._head(place, self._what, claim), cipher)
            self._number = 0
        _, head, cipher = self._stream
        self._number += 1
        body = cipher.encrypt(_nonce(self._number), frame, topic.encode())
        return b"".join((self._start(self._what, 2 * KEY_BYTES, self._number, head), head, body))


class ChunkVerifier:
    """Opens chunks, and refuses those that are not from who may send them there, or not sealed as
    they must be.
    """

    def __init__(self, enrolment: Enrolment, verifier: Verifier, keys: KnownKeys) -> None:
        self._verifier = verifier
        self._keys = keys
        own = enrolment.sealing if enrolment.role == "server" else ()
        self._own = {key.public_key().public_bytes_raw(): key for key in map(private_key, own)}
        self._heads = functools.lru_cache(_KNOWN_HEADS)(self._verified)

    def open(self, topic: str, envelope: bytes) -> OpenedMessage:
        """Verify a chunk: its frame, and who sent it.

        Raises:
            MissingKeyError: the key of its group was not told yet.
            RefusedError: with `FORGED`, `REVOKED` or `BAD_SEAL`.
        """
        forged = RefusalReason.FORGED, f"a chunk on {topic} that nobody has signed"
        if len(envelope) < _START.size or not envelope.startswith(_MAGIC):
            raise RefusedError(*forged)
        _, what, certified, claimed, number = _START.unpack_from(envelope)
        at = _START.size + certified + claimed + SIGNATURE_BYTES
        if certified > CERTIFICATE_LIMIT or claimed > _CLAIM_LIMIT or len(envelope) < at:
            raise RefusedError(*forged)
        head = self._heads(shared_topic(topic), what, certified, envelope[_START.size : at])
        self._verifier.check(topic, head.signer)
        self._keys.record_signer(head.signer)
        body = memoryview(envelope)[at:]
        place = slice(_DIGEST_BYTES * number, _DIGEST_BYTES * (number + 1))
        if head.digests is not None and chunk_digest(body) != head.digests[place]:
            raise RefusedError(
                RefusalReason.FORGED,
                f"a chunk on {topic} that {head.signer.name} has not listed",
            )
        try:
            frame = (
                bytes(body)
                if head.cipher is None
                else head.cipher.decrypt(_nonce(number), body, topic.encode())
            )
        except InvalidTag as error:
            text = f"a chunk on {topic} that was changed after {head.signer.name} had sealed it"
            raise RefusedError(RefusalReason.FORGED, text) from error
        return OpenedMessage(frame, head.signer)

    def _verified(self, place: str, what: int, certified: int, data: bytes) -> _Head:
        certificate = data[:certified]
        claim = data[certified:-SIGNATURE_BYTES]
        signature = data[-SIGNATURE_BYTES:]
        signed = _signed(place, what, certificate, claim)
        signer = self._verifier.verify_signature(
            certificate, signature, signed, f"chunks on {place}"
        )
        if what == _LIST and len(claim) >= _GROUP.size:
            return _Head(
                signer,
                claim[_GROUP.size :],
                self._of_group(place, *_GROUP.unpack_from(claim)),
            )
        if (
            what in _CIPHERS
            and len(claim) == 2 * KEY_BYTES
            and (own := self._own.get(claim[KEY_BYTES:])) is not None
        ):
            try:
                return _Head(
                    signer,
                    None,
                    _stream_cipher(what, own, claim[:KEY_BYTES], claim, place),
                )
            except ValueError as error:  # nothing can be agreed on
                raise self._bad(place, "under no key at all") from error
        raise self._bad(
            place,
            f"sealed by {signer.name} to a key that is not here: an older one, or another's",
        )

    def _of_group(self, place: str, epoch: int, salt: bytes) -> ChaCha20Poly1305 | None:
        if not epoch and self._own:
            raise self._bad(place, "that are not sealed, as all of this fleet's must be")
        key = self._keys.group_key(epoch)
        if epoch and key is None:
            text = f"chunks on {place} under key {epoch} of the fleet, which was not told here"
            raise MissingKeyError(RefusalReason.BAD_SEAL, text)
        return None if key is None else _group_cipher(key, salt, place)

    @staticmethod
    def _bad(place: str, why: str) -> RefusedError:
        return RefusedError(RefusalReason.BAD_SEAL, f"chunks on {place} {why}")
