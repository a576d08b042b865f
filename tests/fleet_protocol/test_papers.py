"""What an operator says after a device was enrolled: it is renewed, others are revoked, and no
server can make it.
"""

import queue
import time
from functools import partial
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from broker_server.service.authority import enroll, found_fleet, renew, renew_server, revoke
from broker_server.service.membership import member_of
from broker_server.service.new_fleet import NewFleet
from broker_server.service.registry import REGISTRY, read_registry
from broker_server.settings.broker import BrokerConfig
from fleet_protocol.errors import ConfigError, RefusalReason, RefusedError
from fleet_protocol.identity import envelope
from fleet_protocol.identity.certificate import Revocations, issue
from fleet_protocol.identity.chunks import ChunkVerifier
from fleet_protocol.identity.enrolment import Papers, read_enrolment, write_secret
from fleet_protocol.identity.envelope import Signer, Verifier
from fleet_protocol.identity.group import DeviceNotices, KnownKeys
from fleet_protocol.identity.member import Member
from fleet_protocol.identity.papers import Membership
from fleet_protocol.identity.replay_guard import ReplayGuard
from fleet_protocol.identity.signed_transport import OpeningInbox, SignedTransport
from fleet_protocol.topics import Topics
from fleet_protocol.transport import OperatorNotice, Received

DAY = 24 * 3600
REPLY = Topics("lab").reply("pi-1")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "lab"
    found_fleet(folder, NewFleet("lab", "127.0.0.1"))
    return folder


def papers_of(folder, name="pi-1"):
    return read_registry(folder).papers()[name]


def refused(work, *arguments):
    with pytest.raises(RefusedError) as caught:
        work(*arguments)
    return caught.value.reason


def test_a_renewed_board_speaks_on_after_its_first_end(folder, tmp_path, monkeypatch):
    """With the same keys and the same file; after a restart as well, and never for a shorter
    time.
    """
    board = Membership(read_enrolment(enroll(folder, "pi-1", days=1)), tmp_path / "papers.json")
    first = board.enrolment
    server = read_enrolment(folder / "server.enrolment")
    assert not board.accept(papers_of(folder)).renewed
    assert renew(folder, ["pi-1"], days=30) == ["pi-1"]
    renewed = papers_of(folder)
    assert board.accept(renewed).renewed
    assert not board.accept(
        renewed
    ).renewed  # the broker has kept it, and says it with every connection
    again = Membership(first, tmp_path / "papers.json")
    assert (
        again.enrolment
        == board.enrolment
        == first.model_copy(update={"certificate": again.enrolment.certificate})
    )
    assert renew(folder, (), days=10) == []
    verifier = Verifier(
        server,
        ReplayGuard(),
        member_of(BrokerConfig(url="mosquitto", identity=folder / "server.enrolment")).revoked,
    )
    monkeypatch.setattr(envelope, "time", SimpleNamespace(time=lambda: time.time() + 2 * DAY))
    assert (
        refused(verifier.open, REPLY, Signer(first, 1).seal(REPLY, b"x")) is RefusalReason.REVOKED
    )
    verifier.open(REPLY, Signer(again.enrolment, 2).seal(REPLY, b"x"))
    farewell = Signer(first, 3).seal(REPLY, b"x", farewell=True)
    assert refused(verifier.open, REPLY, farewell) is RefusalReason.REVOKED


class Wire:
    """What a transport says, with the methods of one that are used here."""

    def __init__(self):
        self.said = []

    def publish(self, topic, payload, *, qos=1, retain=False):
        self.said.append(Received(topic, payload, retain))


def test_a_server_tells_a_board_which_speaks_with_it_at_once(folder, tmp_path, monkeypatch):
    """Once for each connection and change; a board that hears it while it works signs the next
    message with it.
    """
    wires = (Wire(), Wire())
    inbox = queue.SimpleQueue()
    topics = Topics("lab")
    first = read_enrolment(enroll(folder, "pi-1", days=1))
    config = BrokerConfig(url="mosquitto", identity=folder / "server.enrolment")
    renew(folder, ["pi-1"], days=30)
    member = member_of(config)
    notices = DeviceNotices(topics)
    server = SignedTransport(
        wires[0], member, Signer(member.enrolment, 1), KnownKeys(member.enrolment), notices
    )
    keys = KnownKeys(first, tmp_path / "keys.json")
    opening = OpeningInbox(
        inbox, first, Verifier(first, ReplayGuard(), keys.membership.revoked), keys, notices
    )
    board = SignedTransport(wires[1], Member(first, tmp_path), Signer(first, 1), keys, notices)
    board.publish(REPLY, b"before")
    for _ in range(2):
        server.publish(topics.server_status, b"up", retain=True)
    said = [event for event in wires[0].said if event.topic != topics.server_status]
    assert [(event.topic, event.retained) for event in said] == [(topics.papers("pi-1"), True)]
    for _ in range(2):  # the broker keeps it
        opening.put(said[0])
    assert [inbox.get_nowait() for _ in range(2)] == [OperatorNotice(True), OperatorNotice(False)]
    assert inbox.empty()
    board.publish(REPLY, b"after")
    board.publish(topics.upload("t", 0), b"update") if keys.server_key else pytest.fail(
        "no message from the server has arrived"
    )
    notices.forget_all()
    server.publish(topics.server_status, b"up", retain=True)
    assert [event.topic for event in wires[0].said].count(topics.papers("pi-1")) == 2
    monkeypatch.setattr(envelope, "time", SimpleNamespace(time=lambda: time.time() + 2 * DAY))
    verifier, (before, after, chunk) = (
        Verifier(member.enrolment, ReplayGuard(), member.revoked),
        wires[1].said,
    )
    assert refused(verifier.open, REPLY, before.payload) is RefusalReason.REVOKED
    assert verifier.open(REPLY, after.payload).payload == b"after"
    chunks = ChunkVerifier(member.enrolment, verifier, KnownKeys(member.enrolment))
    assert chunks.open(chunk.topic, chunk.payload).payload == b"update"


@pytest.mark.attack(
    "member",
    "Renews its own enrolment, or uses the renewal of another device",
    "refused as `forged`, or ignored",
    "2026-11-23",
)
def test_nobody_but_the_operator_renews_and_for_nobody_else(folder, tmp_path):
    """Not the server, not with what was changed, and not with the papers of another board or
    another enrolment.
    """
    enrolments = [read_enrolment(enroll(folder, name, days=1)) for name in ("pi-1", "pi-2")]
    renew(folder, (), days=30)
    one, two = (Papers.model_validate_json(papers_of(folder, name)) for name in ("pi-1", "pi-2"))
    board = Membership(enrolments[0], tmp_path / "papers.json")
    assert not board.accept(two.to_bytes()).renewed
    changed = ("00" if one.certificate[:2] != "00" else "01") + one.certificate[2:]
    assert (
        refused(board.accept, one.model_copy(update={"certificate": changed}).to_bytes())
        is RefusalReason.FORGED
    )
    key = bytes.fromhex(read_enrolment(folder / "server.enrolment").key)
    own = issue(
        Revocations(fleet="lab", counter=99), Ed25519PrivateKey.from_private_bytes(key)
    ).hex()
    assert refused(board.accept, Papers(revoked=own).to_bytes()) is RefusalReason.FORGED
    assert refused(board.accept, b"{}") is RefusalReason.MALFORMED
    assert board.enrolment == enrolments[0]
    enroll(folder, "pi-1", days=1)
    renew(folder, (), days=60)
    assert not board.accept(
        papers_of(folder)
    ).renewed  # of an enrolment that was not carried to this board


@pytest.mark.parametrize(
    "left", [b"", b'{"revoked": "00', b"\0" * 100], ids=["nothing", "half", "zeros"]
)
def test_a_power_cut_costs_what_the_broker_says_again(folder, tmp_path, left):
    """What was being written is gone; the file of the enrolment was never touched, and is good."""
    first = read_enrolment(enroll(folder, "pi-1", days=1))
    renew(folder, (), days=30)
    path = tmp_path / "papers.json"
    Membership(first, path).accept(papers_of(folder))
    path.write_bytes(left)
    board = Membership(first, path)
    assert board.enrolment == first
    assert board.accept(papers_of(folder)).renewed


@pytest.mark.attack(
    "broker",
    "Sends an older list of revocations",
    "refused as `replayed`",
    "2026-11-23",
)
def test_revocations_never_go_back(folder, tmp_path):
    """A board that knows the newest list takes no older one, over restarts too; a key that was
    revoked stays so.
    """
    board = read_enrolment(enroll(folder, "pi-1"))
    old = read_enrolment(folder / "server.enrolment")
    before = papers_of(folder)
    renew_server(folder)
    standing = Membership(board, tmp_path / "papers.json")
    standing.accept(papers_of(folder))
    for known in (standing, Membership(board, tmp_path / "papers.json")):
        assert refused(known.accept, before) is RefusalReason.REPLAYED
        topic = Topics("lab").task("pi-1")
        stolen = Signer(old, 9).seal(topic, b"x")  # which this board has never heard
        assert (
            refused(Verifier(board, ReplayGuard(), known.revoked).open, topic, stolen)
            is RefusalReason.REVOKED
        )


def test_a_fleet_of_another_name_than_the_enrolment_is_an_error(folder):
    """Its server would refuse all that it says itself, and wait for boards that nobody lets in."""
    config = BrokerConfig(url="mosquitto", identity=folder / "server.enrolment")
    assert member_of(config, "lab") is not None
    with pytest.raises(
        ConfigError, match='belongs to fleet "lab", but the configuration has fleet = "other"'
    ):
        member_of(config, "other")


@pytest.mark.attack(
    "broker",
    "Takes over the server and tries to withdraw a revocation",
    "refused, because only the operator can sign the list",
    "2026-11-23",
)
def test_who_takes_the_server_over_takes_no_revocation_back(folder):
    """Neither by an older registry nor by one that was edited: that needs the operator's key."""
    pi = read_enrolment(enroll(folder, "pi-1"))
    enroll(folder, "pi-2")
    config = BrokerConfig(url="mosquitto", identity=folder / "server.enrolment")
    before = (folder / REGISTRY).read_bytes()
    server = member_of(config)
    assert set(server.group().readers) == {"pi-1", "pi-2"}
    assert not Membership(pi, folder / "none").revoked(Membership(pi, folder / "none").certificate)
    revoke(folder, "pi-1")
    revoked = member_of(config)
    newest = (folder / REGISTRY).read_bytes()
    (folder / REGISTRY).write_bytes(before)
    with pytest.raises(ConfigError, match="not the latest that the operator has signed"):
        member_of(config)
    (folder / REGISTRY).write_bytes(newest.replace(b'"revoked": true', b'"revoked": false'))
    assert read_registry(folder).devices().keys() == {"pi-1", "pi-2"}
    edited = member_of(config)
    assert edited.revoked(Membership(pi, folder / "none").certificate)
    assert set(edited.group().readers) == {"pi-2"}
    assert edited.group().epoch >= revoked.group().epoch > server.group().epoch


def test_who_has_ended_reads_nothing_more(folder, monkeypatch):
    """The key of the fleet changes when an enrolment ends, and again never to an earlier one."""
    for name, days in (("pi-1", 1), ("pi-2", 0)):
        enroll(folder, name, days=days)
    config = BrokerConfig(url="mosquitto", identity=folder / "server.enrolment")
    epochs = [member_of(config).group().epoch]
    for later, names in ((0, {"pi-1", "pi-2"}), (2, {"pi-2"})):
        clock = SimpleNamespace(
            time=partial(float, time.time() + later * DAY), monotonic=time.monotonic
        )
        monkeypatch.setattr("broker_server.service.registry.time", clock)
        group = member_of(config).group()
        assert set(group.readers) == names
        epochs.append(group.epoch)
    monkeypatch.setattr("broker_server.service.operator_key.time", clock)
    renew(folder, ["pi-1"], days=1)
    group = member_of(config).group()
    assert set(group.readers) == {"pi-1", "pi-2"}
    assert epochs[0] == epochs[1] < epochs[2] <= group.epoch


def test_a_server_that_was_renewed_says_so_when_it_starts_again(folder):
    """Until then boards need it, and it is the old one that would say it."""
    enroll(folder, "pi-1")
    running = member_of(BrokerConfig(url="mosquitto", identity=folder / "server.enrolment"))
    assert set(running.papers()) == {"pi-1"}
    renew_server(folder)
    again = member_of(BrokerConfig(url="mosquitto", identity=folder / "server.enrolment"))
    reader = running.papers.__self__
    reader._read_at = -1e9
    assert running.papers() == {}
    assert set(again.papers()) == {"pi-1"}


def test_who_cannot_be_renewed(folder):
    """No such device, one from before, no operator's key."""
    enroll(folder, "pi-1", days=1)
    with pytest.raises(ConfigError, match=r"this fleet has no device .*; it has pi-1"):
        renew(folder, ["pi-9"], days=3)
    registry = read_registry(folder)
    entry = registry.members["pi-1"].model_copy(update={"certificate": None})
    registry.model_copy(update={"members": {"pi-1": entry}}).write(folder)
    with pytest.raises(ConfigError, match="shoal enroll pi-1"):
        renew(folder, ["pi-1"], days=3)
    (folder / "operator.pem").unlink()
    with pytest.raises(ConfigError, match="operator's key"):
        renew(folder, ["pi-1"], days=3)


def test_a_revocation_without_the_operators_key_counts_here_until_it_is_signed(folder):
    """At this server and its broker at once, and the error says what is missing."""
    pi = Membership(read_enrolment(enroll(folder, "pi-1")), folder / "none")
    lists = (folder / "crl.pem").read_bytes()
    key = (folder / "operator.pem").read_bytes()
    (folder / "operator.pem").unlink()
    with pytest.raises(ConfigError, match="operator's key"):
        revoke(folder, "pi-1")
    config = BrokerConfig(url="mosquitto", identity=folder / "server.enrolment")
    assert member_of(config).revoked(pi.certificate)
    assert (folder / "crl.pem").read_bytes() != lists
    write_secret(folder / "operator.pem", key)
    revoke(folder, "pi-1")
    enroll(folder, "pi-2")
    board = Membership(pi.enrolment, folder / "none")
    board.accept(papers_of(folder, "pi-2"))
    assert board.revoked(pi.certificate)
