"""Envelopes: whose message it is, where it may be said, and that it is said once."""

import json
import os
import stat
import time

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from broker_server.service.authority import enroll, found_fleet, renew_server, revoke
from broker_server.service.new_fleet import NewFleet
from broker_server.service.registry import RegistryReader
from fleet_protocol.blob_store import write_atomically
from fleet_protocol.errors import ConfigError, RefusalReason, RefusedError
from fleet_protocol.identity import counter_file
from fleet_protocol.identity.certificate import Certificate, issue
from fleet_protocol.identity.counter_file import CounterFile
from fleet_protocol.identity.enrolment import Enrolment, read_enrolment, write_secret
from fleet_protocol.identity.envelope import Signer, Verifier
from fleet_protocol.identity.papers import Membership
from fleet_protocol.identity.replay_guard import ReplayGuard, next_session
from fleet_protocol.topics import Topics

TOPICS = Topics("lab")
TASK = TOPICS.task("pi-1")
REPLY = TOPICS.reply("pi-1")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """A founded fleet: its folder, the server, two devices."""
    folder = tmp_path_factory.mktemp("fleet") / "lab"
    found_fleet(folder, NewFleet("lab", "127.0.0.1"))
    return (
        folder,
        read_enrolment(folder / "server.enrolment"),
        *(read_enrolment(enroll(folder, f"pi-{i}")) for i in (1, 2)),
    )


def refused(verifier, topic, envelope, **options):
    with pytest.raises(RefusedError) as caught:
        verifier.open(topic, envelope, **options)
    return caught.value.reason


@pytest.mark.attack(
    "member",
    "Publishes on a topic of another device or of the server",
    "refused as `forged`",
    "2026-11-22",
)
def test_each_speaks_under_its_own_name_and_the_server_everywhere_else(fleet):
    """Who may sign what is a matter of the topic."""
    _, server, board, two = fleet
    verifier = Verifier(board, ReplayGuard())
    sent_on = {
        server: [
            TASK,
            TOPICS.blob("0" * 64, 1),
            TOPICS.server_status,
            TOPICS.server_events,
            TOPICS.server_control,
        ],
        board: [REPLY, TOPICS.status("pi-1"), TOPICS.upload("t", 0)],
        two: [TOPICS.reply("pi-2"), TOPICS.status("pi-2"), TOPICS.upload("t", 0)],
    }
    topics = {topic for listed in sent_on.values() for topic in listed} | {
        "shoal/v1/other/server/status",
        "shoal/v1/lab/x",
    }
    for member, allowed in sent_on.items():
        signer = Signer(member, 1)
        for topic in topics:
            envelope = signer.seal(topic, b"words")
            if topic in allowed:
                opened = verifier.open(topic, envelope)
                assert (opened.payload, opened.signer.name) == (b"words", member.name)
            else:
                assert refused(verifier, topic, envelope) is RefusalReason.FORGED


@pytest.mark.attack(
    "outsider",
    "Replays a genuine message, or sends it on another topic",
    "refused as `replayed` or `forged`",
    "2026-11-22",
)
def test_a_message_is_taken_once_and_in_order(fleet):
    """Said again, or after a later one, it is a replay; on another topic a forgery."""
    _, server, board, _ = fleet
    verifier = Verifier(board, ReplayGuard())
    signer = Signer(server, 7)
    first = signer.seal(TASK, b"1")
    second = signer.seal(TASK, b"2")
    verifier.open(TASK, first)
    assert refused(verifier, TASK, first) is RefusalReason.REPLAYED
    verifier.open(TASK, second)
    assert refused(verifier, TASK, first) is RefusalReason.REPLAYED
    assert refused(verifier, TOPICS.task("pi-2"), second) is RefusalReason.FORGED


@pytest.mark.attack(
    "member",
    "Connects with a copy of another device's enrolment",
    "refused as `replayed`; the log shows the command that invalidates both copies",
    "2026-11-23",
)
def test_a_copy_of_an_enrolment_is_told_from_its_board_until_a_new_one_ends_both(tmp_path):
    """The board that started last is heard, what the other says is refused with what to do; then
    neither is heard.
    """
    folder = tmp_path / "lab"
    found_fleet(folder, NewFleet("lab", "127.0.0.1"))
    server = read_enrolment(folder / "server.enrolment")
    first_papers = read_enrolment(enroll(folder, "pi-1"))
    topic = TOPICS.status("pi-1")
    verifier = Verifier(server, ReplayGuard())
    board = Signer(first_papers, 7)
    copied = Signer(first_papers, 8)
    verifier.open(topic, board.seal(topic, b"here"))
    verifier.open(topic, copied.seal(topic, b"here too"))
    with pytest.raises(
        RefusedError,
        match=r"a message of pi-1 .* two boards use its enrolment: `shoal enroll pi-1` ends both",
    ):
        verifier.open(topic, board.seal(topic, b"still here"))
    new = read_enrolment(enroll(folder, "pi-1"))
    after = Verifier(server, ReplayGuard(), Membership(server, tmp_path / "none").revoked)
    after.open(topic, Signer(new, 9).seal(topic, b"the right one"))


def test_what_the_broker_kept_may_be_the_last_message_again(fleet):
    """A retained status comes with every subscription; an older one does not."""
    _, _, board, _ = fleet
    topic = TOPICS.status("pi-1")
    verifier = Verifier(board, ReplayGuard())
    signer = Signer(board, 7)
    old = signer.seal(topic, b"old")
    new = signer.seal(topic, b"new")
    for _ in range(2):
        verifier.open(topic, new, retained=True)
    assert refused(verifier, topic, new) is RefusalReason.REPLAYED
    assert refused(verifier, topic, old, retained=True) is RefusalReason.REPLAYED


@pytest.mark.attack(
    "broker",
    "Publishes an old farewell of a device, so that the device would count as offline",
    "refused as `replayed` if the farewell belongs to an earlier session",
    "2026-11-22",
)
def test_a_farewell_counts_as_the_last_of_its_session(fleet):
    """It was signed before everything else; one of an earlier session says nothing about this
    one.
    """
    _, _, board, _ = fleet
    topic = TOPICS.status("pi-1")
    verifier = Verifier(board, ReplayGuard())
    before = Signer(board, 7)
    now = Signer(board, 8)
    stale = before.seal(topic, b"off", farewell=True)
    will = now.seal(topic, b"off", farewell=True)
    verifier.open(topic, now.seal(topic, b"on"))
    verifier.open(topic, will)
    verifier.open(topic, now.seal(topic, b"on again"))
    assert refused(verifier, topic, stale) is RefusalReason.REPLAYED


@pytest.mark.attack(
    "broker",
    "Replays an offer to a device after the device has restarted",
    "refused as `replayed`, even if the device has no clock",
    "2026-11-22",
)
def test_a_board_remembers_over_restarts_and_without_a_clock(fleet, tmp_path):
    """A replay after the board's restart is one; a sender's next session is a later one, whatever
    its clock says.
    """
    _, server, board, _ = fleet
    path = tmp_path / "heard.json"
    envelope = Signer(server, 7).seal(TASK, b"1")
    Verifier(board, ReplayGuard(path)).open(TASK, envelope)
    assert refused(Verifier(board, ReplayGuard(path)), TASK, envelope) is RefusalReason.REPLAYED
    ahead = int(time.time()) + 10**6
    write_secret(tmp_path / "session.json", json.dumps({"session": ahead}))
    assert [next_session(tmp_path / "session.json") for _ in range(2)] == [ahead + 1, ahead + 2]
    (tmp_path / "session.json").write_text("power cut")
    assert next_session(tmp_path / "session.json") >= int(time.time()) - 1


@pytest.mark.attack(
    "outsider",
    "Replays an earlier status or farewell to a server that has restarted",
    "refused as `replayed`",
    "2026-11-28",
)
def test_a_server_remembers_every_counter_over_restarts(fleet, tmp_path):
    """A status that a broker kept counts after a restart only if no later one came before; the last
    one itself comes again.
    """
    _, server, board, two = fleet
    path = tmp_path / "heard.counters"
    topic = TOPICS.status("pi-1")

    def started():
        return Verifier(server, ReplayGuard(counter_file=CounterFile(path)))

    signer = Signer(board, 7)
    will = Signer(board, 6).seal(topic, b"off", farewell=True)
    old = signer.seal(topic, b"old")
    new = signer.seal(topic, b"new")
    first = started()
    first.open(topic, old)
    first.open(topic, new)
    first.open(TOPICS.status("pi-2"), Signer(two, 3).seal(TOPICS.status("pi-2"), b"other"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with path.open("ab") as file:
        file.write(b"torn by a power cut\n99999999999 \n\xff 12")
    for _ in range(2):
        again = started()
        assert refused(again, topic, old, retained=True) is RefusalReason.REPLAYED
        assert refused(again, topic, will, retained=True) is RefusalReason.REPLAYED
        again.open(topic, new, retained=True)
    again.open(topic, signer.seal(topic, b"newer"))
    assert refused(started(), topic, new, retained=True) is RefusalReason.REPLAYED


def test_the_file_of_counters_does_not_grow_without_end(fleet, tmp_path, monkeypatch):
    """It is written anew, with each counter once; and a disk that is full loses no message."""
    monkeypatch.setattr(counter_file, "_MOST_LINES", 20)
    _, server, board, _ = fleet
    path = tmp_path / "heard.counters"
    verifier = Verifier(server, ReplayGuard(counter_file=CounterFile(path)))
    signer = Signer(board, 7)
    for _ in range(100):
        verifier.open(REPLY, signer.seal(REPLY, b"x"))
        assert len(path.read_text().splitlines()) <= 26
    path.unlink()
    path.mkdir()
    verifier.open(REPLY, signer.seal(REPLY, b"x"))


def test_sessions_go_on_after_2106(tmp_path, monkeypatch):
    """Seconds since 1970 have more than 32 bits then; numbers grow on, also over restarts, and what
    was signed before stays old.
    """
    path = tmp_path / "session.json"
    moments = [2**32 - 2, 2**32, 2**32 + 1, 2**32 + 10**6, 2**33, 2**34]
    sessions = []
    for moment in moments:
        monkeypatch.setattr(time, "time", lambda moment=moment: float(moment))
        sessions.append(next_session(path))
    assert sessions == sorted(set(sessions))
    assert sessions[-1] < 2**32
    monkeypatch.setattr(time, "time", lambda: 1.8e9)
    path.unlink()
    assert next_session(path) == 1_800_000_000
    monkeypatch.setattr(time, "time", lambda: 2.0**60)
    assert next_session(path) == 1_800_000_001
    path.write_text(json.dumps({"session": 2**32 - 1}))
    with pytest.raises(ConfigError, match="enrol the member again"):
        next_session(path)


def test_a_session_is_kept_before_it_is_used(tmp_path, monkeypatch):
    """The file and then its name wait for the disk: a card without a clock knows by it alone that
    time passed.
    """
    synced = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
    )
    next_session(tmp_path / "session.json")
    assert synced == [False, True]


@pytest.mark.attack(
    "outsider",
    "Creates a fleet with the same name, and signs messages with the keys of that fleet",
    "refused as `forged`",
    "2026-11-22",
)
def test_another_fleets_operator_vouches_for_nobody_here(fleet, tmp_path):
    """The same names under another operator; a certificate that was changed; a device that calls
    itself the server.
    """
    _, server, board, _ = fleet
    found_fleet(tmp_path / "fake", NewFleet("lab", "127.0.0.1"))
    impostor = read_enrolment(tmp_path / "fake" / "server.enrolment")
    verifier = Verifier(board, ReplayGuard())
    assert refused(verifier, TASK, Signer(impostor, 1).seal(TASK, b"x")) is RefusalReason.FORGED
    stolen = server.model_copy(update={"key": impostor.key})
    assert refused(verifier, TASK, Signer(stolen, 1).seal(TASK, b"x")) is RefusalReason.FORGED
    raised = bytes.fromhex(board.certificate).replace(b'"device"', b'"server"')
    promoted = board.model_copy(update={"certificate": raised.hex()})
    assert refused(verifier, TASK, Signer(promoted, 1).seal(TASK, b"x")) is RefusalReason.FORGED
    assert refused(verifier, TASK, b'{"schema_version":3}') is RefusalReason.FORGED


@pytest.mark.attack(
    "member",
    "Keeps sending after its revocation, or uses an older enrolment",
    "refused as `revoked`, even if the server has not restarted",
    "2026-11-22",
)
def test_revoked_expired_and_superseded_members_are_none(tmp_path):
    """At the server at once, without a restart; an older key of the server's at a board that has
    heard the newer.
    """
    folder = tmp_path / "lab"
    found_fleet(folder, NewFleet("lab", "127.0.0.1"))
    server = read_enrolment(folder / "server.enrolment")
    old = read_enrolment(enroll(folder, "pi-1"))
    reader = RegistryReader(folder, Membership(server, folder / "server" / "papers.json"))
    reader._read_at = -1e9
    verifier = Verifier(server, ReplayGuard(), reader.revoked)
    verifier.open(REPLY, Signer(old, 1).seal(REPLY, b"x"))
    new = read_enrolment(enroll(folder, "pi-1"))
    reader._read_at = -1e9
    assert refused(verifier, REPLY, Signer(old, 2).seal(REPLY, b"x")) is RefusalReason.REVOKED
    verifier.open(REPLY, Signer(new, 2).seal(REPLY, b"x"))
    revoke(folder, "pi-1")
    reader._read_at = -1e9
    assert refused(verifier, REPLY, Signer(new, 3).seal(REPLY, b"x")) is RefusalReason.REVOKED
    board = Verifier(new, ReplayGuard(tmp_path / "heard.json"))
    renewed = read_enrolment(renew_server(folder))
    board.open(TASK, Signer(renewed, 1).seal(TASK, b"x"))
    again = Verifier(new, ReplayGuard(tmp_path / "heard.json"))
    assert refused(again, TASK, Signer(server, 9).seal(TASK, b"x")) is RefusalReason.REVOKED


@pytest.mark.attack(
    "member",
    "Keeps sending after its enrolment has expired",
    "refused as `revoked`",
    "2026-11-22",
)
def test_an_enrolment_that_expires_is_none_after_that():
    """The server looks at its clock; boards may not have one."""
    operator = Ed25519PrivateKey.generate()
    key = Ed25519PrivateKey.generate()
    public = operator.public_key().public_bytes_raw().hex()
    for expires, ends in ((1, True), (int(time.time()) + 1000, False)):
        own = key.public_key().public_bytes_raw().hex()
        certificate = Certificate(
            fleet="lab", role="device", name="pi-1", key=own, serial=1, expires=expires
        )
        member = Enrolment(
            fleet="lab",
            role="device",
            name="pi-1",
            broker="mqtt://127.0.0.1",
            operator=public,
            certificate=issue(certificate, operator).hex(),
            key=key.private_bytes_raw().hex(),
            token="",
        )
        verifier = Verifier(member, ReplayGuard())
        envelope = Signer(member, 1).seal(REPLY, b"x")
        if ends:
            assert refused(verifier, REPLY, envelope) is RefusalReason.REVOKED
        else:
            verifier.open(REPLY, envelope)


@pytest.mark.attack(
    "outsider",
    "Changes any byte of a signed message, or truncates the message",
    "refused as `forged`",
    "2026-11-22",
)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_changed_envelope_is_opened(fleet, data):
    """Whichever byte is changed or cut off, the message is refused and nothing else happens."""
    _, server, board, _ = fleet
    envelope = bytearray(Signer(server, 7).seal(TASK, b"some words"))
    at = data.draw(st.integers(0, len(envelope) - 1))
    if data.draw(st.booleans()):
        envelope[at] ^= data.draw(st.integers(1, 255))
    else:
        del envelope[at:]
    assert refused(Verifier(board, ReplayGuard()), TASK, bytes(envelope)) is RefusalReason.FORGED


def test_secrets_are_for_their_owner_alone(fleet, tmp_path):
    """Every file of a fleet's folder; an enrolment that others may read is not taken."""
    folder = fleet[0]
    before = os.umask(0)
    try:
        write_atomically(tmp_path / "board" / "papers.json", b"what the operator says")
    finally:
        os.umask(before)
    kept = tmp_path / "board" / "papers.json"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (kept.parent, kept)] == [0o700, 0o600]
    for path in folder.rglob("*"):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    copy = tmp_path / "pi.enrolment"
    copy.write_text((folder / "devices" / "pi-1.enrolment").read_text())
    copy.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_enrolment(copy)
    copy.chmod(0o600)
    copy.write_text("{}")
    with pytest.raises(ConfigError, match="shoal enroll"):
        read_enrolment(copy)


def test_what_cannot_be_founded_enrolled_or_revoked(fleet, tmp_path):
    """A folder with something in it, names that are none, a device that never was."""
    folder = fleet[0]
    for wrong in (
        lambda: found_fleet(folder, NewFleet("lab", "127.0.0.1")),
        lambda: found_fleet(tmp_path / "x", NewFleet("a/b", "127.0.0.1")),
        lambda: enroll(folder, "server"),
        lambda: enroll(folder, "a/b"),
        lambda: enroll(tmp_path / "nothing", "pi-1"),
        lambda: revoke(folder, "pi-9"),
        lambda: revoke(folder, "server"),
    ):
        with pytest.raises(ConfigError):
            wrong()
