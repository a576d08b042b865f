"""Chunks in sealed envelopes: only their reader opens them, only where they are for, only their
sender makes them.
"""

import contextlib
import gc
import queue
import tracemalloc
from dataclasses import replace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from broker_server.service.authority import enroll, found_fleet, renew, renew_server, revoke
from broker_server.service.membership import member_of, why_unsealed
from broker_server.service.new_fleet import NewFleet
from broker_server.service.registry import read_registry
from broker_server.settings.broker import BrokerConfig
from fleet_protocol.digests import chunk_digest
from fleet_protocol.errors import RefusalReason, RefusedError, TransportError
from fleet_protocol.identity import chunks, sealing
from fleet_protocol.identity.chunks import ChunkSigner, ChunkVerifier, MissingKeyError, shared_topic
from fleet_protocol.identity.enrolment import read_enrolment
from fleet_protocol.identity.envelope import Signer, Verifier
from fleet_protocol.identity.group import DeviceNotices, KnownKeys
from fleet_protocol.identity.replay_guard import ReplayGuard
from fleet_protocol.identity.sealing import new_key, public_key, seal, unseal
from fleet_protocol.identity.signed_transport import OpeningInbox, SignedTransport
from fleet_protocol.topics import Topics
from fleet_protocol.transport import Received, Rejected
from tests.memory_transport import MemoryLink

KEY = new_key()
TOPICS = Topics("lab")
UPLOAD = TOPICS.upload("t1", 0)
BLOB = TOPICS.blob("0" * 64, 0)
FRAME = b"weights of a board"


class Board:
    """A device of a fleet at its end of the wire."""

    def __init__(self, enrolment, server):
        self.enrolment = enrolment
        self.keys = KnownKeys(enrolment)
        self.verifier = Verifier(enrolment, ReplayGuard())
        self.chunks = ChunkVerifier(enrolment, self.verifier, self.keys)
        self.signer = ChunkSigner(enrolment, self.keys)
        topic = TOPICS.task(enrolment.name)
        self.keys.record_signer(
            self.verifier.open(topic, Signer(server, 1).seal(topic, b"hello")).signer
        )

    def told(self, group):
        topic = TOPICS.key(self.enrolment.name)
        payload = dict(DeviceNotices(TOPICS).keys_due(group)).get(topic)
        if payload is not None:
            self.keys.receive_group_key(topic, payload)
        return self


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "lab"
    found_fleet(folder, NewFleet("lab", "127.0.0.1"))
    return folder


def server_of(folder):
    return member_of(BrokerConfig(url="mosquitto", identity=folder / "server.enrolment"))


def opener(enrolment):
    return ChunkVerifier(enrolment, Verifier(enrolment, ReplayGuard()), KnownKeys(enrolment))


def listed(member, topic=BLOB, *frames, group=True):
    chunks = [
        (topic.rpartition("/")[0] + f"/{i}", frame) for i, frame in enumerate(frames or (FRAME,))
    ]
    signer = ChunkSigner(member.enrolment, KnownKeys(member.enrolment))
    return list(signer.sign_list(shared_topic(topic), chunks, member.group() if group else None))


def refused(work, *arguments):
    with pytest.raises(RefusedError) as caught:
        work(*arguments)
    return caught.value.reason


@pytest.mark.attack(
    "broker",
    "Moves a sealed chunk of an update to another task or position",
    "refused; the chunk can be decrypted only for its own task",
    "2026-11-23",
)
@pytest.mark.parametrize("aes", [True, False])
def test_a_chunk_of_an_update_opens_for_the_server_and_its_place_alone(folder, aes, monkeypatch):
    """One signature serves for all of them; the body is another every time, and what changed on its
    way is refused.
    """
    monkeypatch.setattr(chunks, "fast_aes", lambda: aes)
    server = server_of(folder).enrolment
    one, two = (Board(read_enrolment(enroll(folder, f"pi-{i}")), server) for i in (1, 2))
    first, again = (one.signer.seal_to_server(UPLOAD, FRAME) for _ in range(2))
    reader = opener(server)
    for envelope in (first, again, first):  # a chunk may come again
        opened = reader.open(UPLOAD, envelope)
        assert (opened.payload, opened.signer.name) == (FRAME, "pi-1")
        assert FRAME not in envelope
    assert first[-len(FRAME) - 16 :] != again[-len(FRAME) - 16 :]
    assert (
        first[13 : -len(FRAME) - 16] == again[13 : -len(FRAME) - 16]
    )  # certificate, keys and signature
    for topic in (TOPICS.upload("t1", 1), TOPICS.upload("t2", 0), BLOB):
        assert refused(reader.open, topic, first) is RefusalReason.FORGED
    assert refused(two.chunks.open, UPLOAD, first) is RefusalReason.BAD_SEAL
    assert (
        refused(reader.open, UPLOAD, Signer(one.enrolment, 1).seal(UPLOAD, FRAME))
        is RefusalReason.FORGED
    )
    mine = two.signer.seal_to_server(UPLOAD, b"evil")
    assert (
        reader.open(UPLOAD, mine).signer.name == "pi-2"
    )  # who owns the task is the server's business


@pytest.mark.attack(
    "broker",
    "Changes any byte of a sealed chunk",
    "refused as `forged` or `bad-seal`",
    "2026-11-22",
)
@given(data=st.data())
def test_no_changed_chunk_opens(data, envelopes):
    """Whichever byte of whichever envelope is changed, and whatever is cut off."""
    reader, topic, envelope = data.draw(st.sampled_from(envelopes))
    at = data.draw(st.integers(0, len(envelope) - 1))
    flip = data.draw(st.integers(1, 255))
    changed = bytearray(envelope)
    changed[at] ^= flip
    for wrong in (bytes(changed), envelope[:at]):
        with pytest.raises(RefusedError):
            reader.open(topic, wrong)


@pytest.fixture(scope="module")
def envelopes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fleet") / "lab"
    found_fleet(folder, NewFleet("lab", "127.0.0.1"))
    board = read_enrolment(enroll(folder, "pi-1"))
    server = server_of(folder)
    board = Board(board, server.enrolment).told(server.group())
    return [
        (opener(server.enrolment), UPLOAD, board.signer.seal_to_server(UPLOAD, FRAME)),
        (board.chunks, BLOB, listed(server)[0]),
        (board.chunks, BLOB, listed(server, group=False)[0]),
    ]


@pytest.mark.attack(
    "member",
    "Forges a chunk of a blob, using the fleet's key",
    "refused as `forged`",
    "2026-11-22",
)
def test_blobs_are_read_by_members_and_made_by_the_server_alone(folder):
    """Who has the group's key reads; neither another member nor whoever repeats the server's list
    adds a chunk.
    """
    one, two = (read_enrolment(enroll(folder, f"pi-{i}")) for i in (1, 2))
    server = server_of(folder)
    one, two = (Board(member, server.enrolment).told(server.group()) for member in (one, two))
    sent = listed(server, BLOB, FRAME, b"more")
    assert [
        one.chunks.open(f"{shared_topic(BLOB)}/{i}", envelope).payload
        for i, envelope in enumerate(sent)
    ] == [
        FRAME,
        b"more",
    ]
    assert not any(FRAME in envelope for envelope in sent)
    assert refused(one.chunks.open, f"{shared_topic(BLOB)}/1", sent[0]) is RefusalReason.FORGED
    assert refused(one.chunks.open, TOPICS.blob("1" * 64, 0), sent[0]) is RefusalReason.FORGED
    insider = ChunkSigner(two.enrolment, two.keys)
    forged = next(insider.sign_list(shared_topic(BLOB), ((BLOB, b"evil"),), server.group()))
    assert refused(one.chunks.open, BLOB, forged) is RefusalReason.FORGED
    # The insider knows the key and the salt, so it can seal a body of its own under the server's
    # list.
    certified = len(bytes.fromhex(server.enrolment.certificate))
    salt = sent[0][13 + certified + 4 :][:16]
    key = HKDF(
        SHA256(), 32, salt=None, info=b"shoal-group-1\0" + salt + shared_topic(BLOB).encode()
    ).derive(server.group().key)
    body = ChaCha20Poly1305(key).encrypt(bytes(12), FRAME[::-1], BLOB.encode())
    assert refused(one.chunks.open, BLOB, sent[0][: -len(body)] + body) is RefusalReason.FORGED
    assert ChaCha20Poly1305(key).decrypt(bytes(12), sent[0][-len(body) :], BLOB.encode()) == FRAME


@pytest.mark.attack(
    "member",
    "Keeps reading after its revocation",
    "the server has changed the fleet's key, so the device can decrypt no chunk",
    "2026-11-22",
)
def test_a_revoked_device_reads_nothing_that_is_sent_from_then_on(folder):
    """The key changes with the revocation, and is told to those who are left; so it is when
    somebody enrols again.
    """
    gone, left = (read_enrolment(enroll(folder, name)) for name in ("gone", "left"))
    server = server_of(folder)
    first = server.group()
    boards = [Board(member, server.enrolment).told(first) for member in (gone, left)]
    revoke(folder, "gone")
    second = server_of(folder).group()
    assert second.epoch > first.epoch
    assert second.key != first.key
    assert set(second.readers) == {"left"}
    for board in boards:
        board.told(second)
    sent = listed(server_of(folder))[0]
    assert boards[1].chunks.open(BLOB, sent).payload == FRAME
    with pytest.raises(MissingKeyError):
        boards[0].chunks.open(BLOB, sent)
    enroll(folder, "left")
    renew_server(folder)
    third = server_of(folder).group()
    assert third.epoch == second.epoch + 2
    assert boards[1].keys.group_key(first.epoch) == first.key  # of chunks on their way


def test_client_certificates_of_devices_that_are_none_any_more_are_on_a_list(folder):
    """Signed by the fleet's authority; the server's is not on it, as the one that runs gets in with
    it.
    """
    old, gone, left = (read_enrolment(enroll(folder, name)) for name in ("old", "gone", "left"))
    enroll(folder, "old")
    revoke(folder, "gone")
    renew_server(folder)
    listed = x509.load_pem_x509_crl((folder / "crl.pem").read_bytes())
    authority = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    assert listed.is_signature_valid(authority.public_key())
    numbers = [
        x509.load_pem_x509_certificate(one.tls_certificate.encode()).serial_number
        for one in (old, gone, left)
    ]
    assert [entry.serial_number for entry in listed] == numbers[:2]


def test_a_chunk_that_comes_before_its_key_waits_for_it(folder):
    """A broker keeps the order of one topic only; what waits is bounded; the rest is refused, and
    asked for again.
    """
    enrolment = read_enrolment(enroll(folder, "pi-1"))
    server = server_of(folder)
    inbox = queue.SimpleQueue()
    opening = OpeningInbox(
        inbox,
        enrolment,
        Verifier(enrolment, ReplayGuard()),
        KnownKeys(enrolment),
        DeviceNotices(Topics("lab")),
    )
    for number in range(20):
        topic = TOPICS.blob("0" * 64, number)
        chunk = next(
            ChunkSigner(server.enrolment, KnownKeys(server.enrolment)).sign_list(
                shared_topic(topic), ((topic, b"%d" % number),), server.group()
            )
        )
        opening.put(Received(topic, chunk))
    ((topic, payload),) = DeviceNotices(TOPICS).keys_due(server.group())
    opening.put(Received(topic, Signer(server.enrolment, 1).seal(topic, payload)))
    got = []
    with contextlib.suppress(queue.Empty):
        while True:
            got.append(inbox.get_nowait())
    assert [type(event) for event in got] == [Rejected] * 4 + [Received] * 16
    assert [event.payload for event in got[4:]] == [b"%d" % number for number in range(4, 20)]


def test_what_is_refused_leaves_its_payload_behind(folder):
    """The error had held it: each unsigned chunk of a megabyte was a megabyte that a server
    kept.
    """
    enrolment = server_of(folder).enrolment
    inbox = queue.SimpleQueue()
    opening = OpeningInbox(
        inbox,
        enrolment,
        Verifier(enrolment, ReplayGuard()),
        KnownKeys(enrolment),
        DeviceNotices(Topics("lab")),
    )
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for number in range(20):
            for topic in (TOPICS.upload("t", number), TOPICS.reply("pi-1")):
                opening.put(Received(topic, bytes(1_000_000)))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert inbox.qsize() == 40
    assert held < 2_000_000


class Wire(MemoryLink):
    """A transport that notes what is published."""

    def __init__(self):
        self.said = []

    def publish(self, topic, payload, *, qos=1, retain=False):
        self.said.append(Received(topic, payload, retain))


def test_a_download_goes_on_when_the_key_changes_within_it(folder):
    """A revocation between two windows: whoever is left takes every chunk once, who was revoked
    those before it.
    """
    enrolments = [read_enrolment(enroll(folder, name)) for name in ("gone", "left")]
    server = server_of(folder)
    wire = Wire()
    groups = iter([server.group()])
    revoke(folder, "gone")
    after = server_of(folder).group()
    rotating = replace(server, group=lambda: next(groups, after))
    signed = SignedTransport(
        wire,
        rotating,
        Signer(server.enrolment, 1),
        KnownKeys(server.enrolment),
        DeviceNotices(Topics("lab")),
    )
    chunks = [(TOPICS.blob("0" * 64, number), b"%d" % number) for number in range(40)]
    assert signed.publish_stream(chunks, 0.0) == 40
    assert [
        event.topic for event in wire.said if event.retained and not event.topic.endswith("/papers")
    ] == [
        TOPICS.key("gone"),
        TOPICS.key("left"),
        TOPICS.key("left"),
    ]
    taken = {}
    for enrolment in enrolments:
        inbox = queue.SimpleQueue()
        opening = OpeningInbox(
            inbox,
            enrolment,
            Verifier(enrolment, ReplayGuard()),
            KnownKeys(enrolment),
            DeviceNotices(TOPICS),
        )
        for event in wire.said:
            if not event.retained or event.topic == TOPICS.key(enrolment.name):
                opening.put(event)
        events = [inbox.get_nowait() for _ in range(inbox.qsize())]
        taken[enrolment.name] = [event.payload for event in events if isinstance(event, Received)]
        assert all(
            event.error.reason is RefusalReason.BAD_SEAL
            for event in events
            if isinstance(event, Rejected)
        )
    assert taken == {
        "left": [frame for _, frame in chunks],
        "gone": [frame for _, frame in chunks[:16]],
    }


def test_keys_survive_a_restart_and_nothing_is_sent_before_the_server_is_heard(folder, tmp_path):
    """The broker need not repeat what it told; without a server's key an update stays where it
    is.
    """
    enrolment = read_enrolment(enroll(folder, "pi-1"))
    server = server_of(folder)
    path = tmp_path / "keys.json"
    with pytest.raises(TransportError, match="no message from the server"):
        ChunkSigner(enrolment, KnownKeys(enrolment, path)).seal_to_server(UPLOAD, FRAME)
    keys = KnownKeys(enrolment, path)
    ((topic, payload),) = DeviceNotices(TOPICS).keys_due(server.group())
    keys.receive_group_key(topic, payload)
    assert path.stat().st_mode & 0o077 == 0
    again = KnownKeys(enrolment, path)
    assert again.group_key(server.group().epoch) == server.group().key
    assert refused(again.receive_group_key, topic, b"123") is RefusalReason.BAD_SEAL
    assert refused(again.receive_group_key, TOPICS.key("pi-2"), payload) is RefusalReason.BAD_SEAL


@pytest.mark.attack(
    "broker",
    "Uses a stolen server key after the server's keys have been renewed twice",
    "refused as `bad-seal`",
    "2026-11-22",
)
def test_a_renewed_server_opens_what_was_sealed_to_the_key_before_and_to_no_older_one(folder):
    """A board that heard the new key seals to it; what is not sealed at all is refused, too."""
    enrolment = read_enrolment(enroll(folder, "pi-1"))
    server = server_of(folder)
    old = Board(enrolment, server.enrolment).signer.seal_to_server(UPLOAD, FRAME)
    for renewals in (1, 2):
        renewed = read_enrolment(renew_server(folder))
        new = Board(enrolment, renewed).signer.seal_to_server(UPLOAD, FRAME)
        assert opener(renewed).open(UPLOAD, new).payload == FRAME
        if renewals == 1:
            assert opener(renewed).open(UPLOAD, old).payload == FRAME
    assert refused(opener(renewed).open, UPLOAD, old) is RefusalReason.BAD_SEAL
    bare = next(
        ChunkSigner(enrolment, KnownKeys(enrolment)).sign_list(
            shared_topic(UPLOAD), ((UPLOAD, FRAME),), None
        )
    )
    assert refused(opener(renewed).open, UPLOAD, bare) is RefusalReason.BAD_SEAL


def test_a_fleet_with_an_enrolment_of_before_goes_on_without_seals_until_it_is_renewed(folder):
    """A device without a key reads what the server signs; nothing is sealed to anybody while there
    is one.
    """
    old = read_enrolment(enroll(folder, "old"))
    enroll(folder, "new")
    registry = read_registry(folder)
    members = {
        **registry.members,
        "old": registry.members["old"].model_copy(update={"sealing": None}),
    }
    registry.model_copy(update={"members": members}).write(folder)
    server = server_of(folder)
    assert read_registry(folder).lacking == ["old"]
    assert server.group() is None
    assert "old" in why_unsealed(
        BrokerConfig(url="mosquitto", identity=folder / "server.enrolment")
    )
    sent = listed(server)[0]
    board = Board(old.model_copy(update={"sealing": ()}), server.enrolment)
    assert board.chunks.open(BLOB, sent).payload == FRAME
    assert refused(board.chunks.open, TOPICS.blob("1" * 64, 0), sent) is RefusalReason.FORGED
    enroll(folder, "old")
    assert set(server_of(folder).group().readers) == {"old", "new"}
    assert why_unsealed(BrokerConfig(url="mosquitto", identity=folder / "server.enrolment")) is None


def test_the_formats_are_those_that_are_written_down(folder):
    """OpenedMessage here from the RFCs alone."""
    mine = X25519PrivateKey.from_private_bytes(bytes.fromhex(KEY))
    data = seal(FRAME, public_key(KEY), "place")
    info = b"shoal-seal-2\0" + data[4:36] + mine.public_key().public_bytes_raw()
    shared = mine.exchange(X25519PublicKey.from_public_bytes(data[4:36]))
    cipher = ChaCha20Poly1305(HKDF(SHA256(), 32, salt=None, info=info).derive(shared))
    assert (
        cipher.decrypt(bytes(12), data[36:], b"place")
        == FRAME
        == unseal(data, [new_key(), KEY], "place")
    )
    for wrong in (
        FRAME,
        b"",
        b"SHS2",
        b"SHS2" + bytes(32) + bytes(40),
        data[:-1] + bytes([data[-1] ^ 1]),
    ):
        # The neutral element of the curve would make a cipher that everybody knows (RFC 7748,
        # section 6.1).
        assert refused(unseal, wrong, [KEY], "place") is RefusalReason.BAD_SEAL
    server = server_of(folder)
    envelope = listed(server, group=False)[0]
    certified = len(bytes.fromhex(server.enrolment.certificate))
    assert envelope[13 + certified :][:4] == bytes(4)
    assert envelope[13 + certified + 20 :][:32] == chunk_digest(FRAME)
    assert envelope.endswith(FRAME)


@pytest.mark.parametrize(
    ("aes", "what", "cipher_of"), [(False, b"\x02", ChaCha20Poly1305), (True, b"\x03", AESGCM)]
)
def test_the_format_of_an_update_is_that_which_is_written_down(
    folder, aes, what, cipher_of, monkeypatch
):
    """Whichever cipher the board's processor is quick with, opened from the RFCs and NIST's SP
    800-38D alone.
    """
    monkeypatch.setattr(chunks, "fast_aes", lambda: aes)
    enrolment = read_enrolment(enroll(folder, "pi-1"))
    server = server_of(folder).enrolment
    envelope = Board(enrolment, server).signer.seal_to_server(UPLOAD, FRAME)
    certified = len(bytes.fromhex(enrolment.certificate))
    assert envelope[:13] == b"SHK1" + what + certified.to_bytes(2, "big") + b"\0\x40" + b"\0\0\0\1"
    claim = envelope[13 + certified :][:64]
    key = X25519PrivateKey.from_private_bytes(bytes.fromhex(server.sealing[0]))
    shared = key.exchange(X25519PublicKey.from_public_bytes(claim[:32]))
    info = b"shoal-stream-%d\0" % (1 + aes) + claim + b"shoal/v1/lab/uploads/t1"
    cipher = cipher_of(HKDF(SHA256(), 32, salt=None, info=info).derive(shared))
    body = envelope[13 + certified + 64 + 64 :]
    assert cipher.decrypt(bytes(11) + b"\1", body, UPLOAD.encode()) == FRAME
    # That it is the other cipher is signed.
    assert (
        refused(opener(server).open, UPLOAD, envelope[:4] + bytes([5 - what[0]]) + envelope[5:])
        is RefusalReason.FORGED
    )


def test_a_board_that_is_renewed_within_an_update_goes_on_with_it(folder):
    """Its new certificate may be of another length; what was signed with the one before still
    stands there.
    """
    board = Board(read_enrolment(enroll(folder, "pi-1", days=1)), server_of(folder).enrolment)
    sent = [board.signer.seal_to_server(UPLOAD, FRAME)]
    assert renew(folder, ["pi-1"], days=0) == ["pi-1"]
    board.signer.certificate = bytes.fromhex(read_registry(folder).members["pi-1"].certificate)
    sent += [
        board.signer.seal_to_server(topic, FRAME) for topic in (UPLOAD, TOPICS.upload("t2", 0))
    ]
    reader = opener(server_of(folder).enrolment)
    for topic, envelope in zip((UPLOAD, UPLOAD, TOPICS.upload("t2", 0)), sent, strict=True):
        assert reader.open(topic, envelope).payload == FRAME
    assert len({len(envelope) for envelope in sent}) == 2


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("processor\t: 0\nflags\t\t: fpu sse2 aes avx\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd evtstrm aes pmull\n", True),
        (
            (
                "processor\t: 0\nFeatures\t: fp asimd evtstrm crc32 cpuid\nModel\t: Raspberry Pi 4 "
                "aes\n"
            ),
            False,
        ),
        (None, False),
    ],
)
def test_aes_is_taken_where_the_processor_has_it(tmp_path, text, found, monkeypatch):
    """As Linux says on x86 and ARM; a Raspberry Pi 4 has none, and elsewhere nobody says."""
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(sealing, "Path", lambda _: path)
    assert sealing.fast_aes.__wrapped__() is found
