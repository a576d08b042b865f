"""Sealed updates: only the server reads them, only for the task that they are for."""

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from broker_server.service.authority import Founding, enroll, found_fleet, renew_server
from broker_server.service.membership import unsealing
from broker_server.store import TaskRecord
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.identity.certificate import read_certificate
from fleet_protocol.identity.enrolment import read_enrolment
from fleet_protocol.identity.envelope import Ed25519PublicKey
from fleet_protocol.identity.member import Member
from fleet_protocol.identity.sealing import OVERHEAD_BYTES, Purpose, new_key, public_key, unseal
from fleet_protocol.identity.sealing import seal as seal_in_parts
from fleet_protocol.messages import BlobRef

KEY = new_key()
PURPOSE = Purpose("lab", "r1", 3, "t1", "pi-1", "1e20" + "0" * 64)
UPDATE = b"weights of a board"


def seal(*arguments):
    return b"".join(seal_in_parts(*arguments))


def refused(data, keys=(KEY,), purpose=PURPOSE):
    with pytest.raises(RefusedError) as caught:
        unseal(data, keys, purpose)
    return caught.value.reason


def test_a_sealed_update_opens_for_its_reader_and_its_task_alone():
    """Two seals of one update share nothing; whoever lacks the key, or has another task for it, is refused."""
    one, two = (seal(UPDATE, public_key(KEY), PURPOSE) for _ in range(2))
    assert unseal(one, [KEY], PURPOSE) == unseal(two, [new_key(), KEY], PURPOSE) == UPDATE
    assert len(one) == len(UPDATE) + OVERHEAD_BYTES
    assert one[4:] != two[4:]
    assert UPDATE not in one
    assert refused(one, [new_key()]) is RefusalReason.BAD_SEAL
    others = {
        "fleet": "lib",
        "run": "r2",
        "round": 4,
        "task": "t2",
        "device": "pi-2",
        "artifact_set": "1e20" + "1" * 64,
    }
    for name, value in others.items():
        assert refused(one, purpose=PURPOSE._replace(**{name: value})) is RefusalReason.BAD_SEAL


def test_what_is_not_sealed_is_refused_and_so_is_a_key_on_which_nothing_can_be_agreed():
    """The neutral element of the curve would make a cipher that everybody knows (RFC 7748, section 6.1)."""
    for data in (UPDATE, b"", b"SHS1", b"SHS1" + bytes(32) + bytes(40)):
        assert refused(data) is RefusalReason.BAD_SEAL


@given(at=st.integers(0, len(UPDATE) + OVERHEAD_BYTES - 1), flip=st.integers(1, 255))
def test_no_changed_seal_opens(at, flip):
    """Whichever byte is changed."""
    data = bytearray(seal(UPDATE, public_key(KEY), PURPOSE))
    data[at] ^= flip
    assert refused(bytes(data)) is RefusalReason.BAD_SEAL


def test_the_format_is_the_one_that_is_written_down():
    """Opened here from the RFCs alone."""
    data, mine = seal(UPDATE, public_key(KEY), PURPOSE), X25519PrivateKey.from_private_bytes(bytes.fromhex(KEY))
    shared = mine.exchange(X25519PublicKey.from_public_bytes(data[4:36]))
    info = b"shoal-seal-1\0" + data[4:36] + mine.public_key().public_bytes_raw()
    cipher = ChaCha20Poly1305(HKDF(SHA256(), 32, salt=None, info=info).derive(shared))
    said = b'["lab", "r1", 3, "t1", "pi-1", "1e20' + b"0" * 64 + b'"]'
    assert cipher.decrypt(bytes(12), data[36:], said) == UPDATE


def test_a_renewed_server_opens_what_was_sealed_to_the_key_before_and_to_no_older_one(tmp_path, task_record):
    """The key is the operator's word, in the server's certificate; that of a device has none."""
    folder = tmp_path / "lab"
    found_fleet(folder, Founding("lab", "127.0.0.1"))
    first = read_enrolment(folder / "server.enrolment")
    device = read_enrolment(enroll(folder, "pi-1"))
    assert '"sealing"' not in (folder / "devices" / "pi-1.enrolment").read_text()
    operator = Ed25519PublicKey.from_public_bytes(bytes.fromhex(first.operator))
    certified = [read_certificate(bytes.fromhex(member.certificate), operator).sealing for member in (first, device)]
    assert certified == [public_key(first.sealing[0]), None]
    assert b"sealing" not in bytes.fromhex(device.certificate)  # boards of before it read others' certificates still
    task = task_record
    purpose = Purpose("lab", task.run, task.round, task.id, task.device, task.artifact_set.digest)
    old = seal(UPDATE, certified[0], purpose)
    for renewals in (1, 2):
        server = Member(read_enrolment(renew_server(folder)), folder)
        new = seal(UPDATE, public_key(server.enrolment.sealing[0]), purpose)
        assert unsealing(server)(new, task) == UPDATE
        if renewals == 1:
            assert unsealing(server)(old, task) == UPDATE
    with pytest.raises(RefusedError, match="older key"):
        unsealing(server)(old, task)
    assert unsealing(None) is None
    assert unsealing(Member(device, folder)) is None


@pytest.fixture
def task_record():
    ref = BlobRef(digest="0" * 64, size=1, chunk_bytes=1024)
    return TaskRecord("t1", "r1", 3, "pi-1", "train", "w1.00-d1", "p", 2, ref, ref)
