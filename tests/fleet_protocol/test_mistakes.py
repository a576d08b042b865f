"""Operators who make mistakes, and commands that are killed: who was revoked stays so, and the
fleet goes on.
"""

import datetime as dt
import itertools
import os
import socket
import threading
import time
from ipaddress import ip_address
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.verification import PolicyBuilder, Store

from broker_server.service import authority
from broker_server.service.authority import enroll, found_fleet, renew, renew_server, revoke
from broker_server.service.certificates import Authority
from broker_server.service.membership import (
    broker_address,
    hosted_broker,
    member_of,
    membership_notices,
)
from broker_server.service.new_fleet import NewFleet
from broker_server.service.registry import REGISTRY, read_registry
from broker_server.settings.broker import BrokerConfig
from broker_server.settings.fleet import FleetConfig
from device_runtime.settings import load_device_config
from fleet_protocol.configuration import load_config
from fleet_protocol.errors import ConfigError, RefusalReason, RefusedError, StorageError
from fleet_protocol.identity.enrolment import Papers, read_enrolment, write_secret
from fleet_protocol.identity.envelope import Signer, Verifier
from fleet_protocol.identity.group import DeviceNotices, Group, KnownKeys
from fleet_protocol.identity.member import Member
from fleet_protocol.identity.papers import Membership
from fleet_protocol.identity.replay_guard import ReplayGuard, next_session
from fleet_protocol.identity.sealing import public_key
from fleet_protocol.identity.signed_transport import SignedTransport
from fleet_protocol.topics import Topics
from tests.brokers import free_port

TOPICS = Topics("lab")
DAY = 24 * 3600


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "lab"
    found_fleet(folder, NewFleet("lab", "127.0.0.1"))
    return folder


def server_of(folder):
    return member_of(BrokerConfig(url="mosquitto", identity=folder / "server.enrolment"))


def certificate_of(enrolment, tmp_path):
    return Membership(enrolment, tmp_path / "none").certificate


class Killed(BaseException):
    """The process is no more."""


@pytest.mark.parametrize("command", ["revoke", "enroll", "enroll server", "renew"])
@pytest.mark.parametrize(
    "done", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2, 3, 4))]
)
def test_a_command_that_was_killed_at_any_write_is_given_again(
    folder, tmp_path, monkeypatch, command, done
):
    """Whatever it had written: the server starts, nobody who was revoked is back, and the second
    time it is done.
    """
    gone = read_enrolment(enroll(folder, "gone"))
    one = read_enrolment(enroll(folder, "pi-1", days=1))
    revoke(folder, "gone")
    before = server_of(folder)
    commands = {
        "revoke": lambda: revoke(folder, "pi-1"),
        "enroll": lambda: enroll(folder, "pi-1"),
        "enroll server": lambda: renew_server(folder),
        "renew": lambda: renew(folder, ["pi-1"], days=30),
    }
    left = [done]
    real = write_secret

    def write(path, content):
        if not left[0]:
            raise Killed
        left[0] -= 1
        real(path, content)

    with monkeypatch.context() as patched:
        patched.setattr("broker_server.service.authority.write_secret", write)
        patched.setattr(
            "broker_server.service.registry.write_atomically",
            lambda path, data: write(path, data.decode()),
        )
        try:
            commands[command]()
            killed = False
        except Killed:
            killed = True
    server = server_of(folder)  # it starts
    assert server.revoked(certificate_of(gone, tmp_path))
    assert killed or command != "renew" or server.papers()["pi-1"] != before.papers()["pi-1"]
    commands[command]()
    server = server_of(folder)
    assert server.revoked(certificate_of(gone, tmp_path))
    assert server.group().epoch >= before.group().epoch
    new = (
        one
        if command in ("revoke", "renew")
        else read_enrolment(folder / "devices" / "pi-1.enrolment")
    )
    assert server.revoked(certificate_of(new, tmp_path)) is (command == "revoke")
    assert server.revoked(certificate_of(one, tmp_path)) is (command in ("revoke", "enroll"))
    assert not server.revoked(certificate_of(server.enrolment, tmp_path))
    board = Membership(new, tmp_path / "board.json")
    if command != "revoke":
        assert board.accept(server.papers()["pi-1"]).renewed is (command == "renew")


def test_an_old_registry_takes_up_what_was_revoked_since(folder, tmp_path):
    """The newest is lost: the server names the way out, by which nobody who was revoked comes
    back.
    """
    gone = read_enrolment(enroll(folder, "gone"))
    pi = read_enrolment(enroll(folder, "pi-1"))
    backup = (folder / REGISTRY).read_bytes()
    revoke(folder, "gone")
    last = server_of(folder)
    (folder / REGISTRY).write_bytes(backup)
    with pytest.raises(ConfigError, match="shoal enroll server"):
        server_of(folder)
    renew_server(folder)
    server = server_of(folder)
    assert server.revoked(certificate_of(gone, tmp_path))
    assert not server.revoked(certificate_of(pi, tmp_path))
    assert set(server.group().readers) == {"pi-1"}
    assert server.group().epoch > last.group().epoch
    assert "gone" not in read_registry(folder).names()
    board = Membership(pi, tmp_path / "board.json")
    board.accept(last.papers()["pi-1"])
    board.accept(server.papers()["pi-1"])  # and boards take the new list


def test_a_whole_folder_from_a_backup_is_ahead_of_its_boards_again(folder, tmp_path, monkeypatch):
    """What was signed after the backup is lost, and boards know it: the next command counts beyond
    all of it.
    """
    pi = read_enrolment(enroll(folder, "pi-1"))
    backup = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for _ in range(3):
        enroll(folder, "other")
        renew_server(folder)
    lost = server_of(folder)
    board = Membership(pi, tmp_path / "board.json")
    marks = ReplayGuard(tmp_path / "heard.json")
    board.accept(lost.papers()["pi-1"])
    verifier = Verifier(pi, marks, board.revoked)
    topic = TOPICS.task("pi-1")
    verifier.open(topic, Signer(lost.enrolment, 5).seal(topic, b"x"))
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        path.unlink()
    for path, data in backup.items():
        write_secret(path, data)
    old = server_of(folder)
    with pytest.raises(RefusedError, match="older than the known"):
        board.accept(old.papers()["pi-1"])
    with pytest.raises(RefusedError) as caught:
        verifier.open(topic, Signer(old.enrolment, 9).seal(topic, b"x"))
    assert caught.value.reason is RefusalReason.REVOKED
    for where in ("operator_key", "registry"):  # as a backup is older than some seconds
        clock = SimpleNamespace(time=lambda: time.time() + DAY, monotonic=time.monotonic)
        monkeypatch.setattr(f"broker_server.service.{where}.time", clock)
    renew_server(folder)
    again = server_of(folder)
    board.accept(again.papers()["pi-1"])
    verifier.open(topic, Signer(again.enrolment, 9).seal(topic, b"x"))


@pytest.mark.parametrize("ahead", [-40 * 365 * DAY, 200 * 365 * DAY])
def test_an_operator_whose_clock_is_off_by_decades_still_revokes(
    folder, tmp_path, monkeypatch, ahead
):
    """Numbers grow whatever the clock says, and fit where they are told. Before this program was
    written it makes no keys, but still revokes.
    """
    pi = read_enrolment(enroll(folder, "pi-1"))
    enroll(folder, "other", days=5)
    clock = SimpleNamespace(time=lambda: time.time() + ahead, monotonic=time.monotonic)
    with monkeypatch.context() as patched:
        for where in ("operator_key", "registry"):
            patched.setattr(f"broker_server.service.{where}.time", clock)
        if ahead < 0:
            with pytest.raises(ConfigError, match="the clock of this machine"):
                enroll(folder, "other", days=5)
        else:
            for _ in range(3):
                enroll(folder, "other", days=5)
        revoke(folder, "other")
    server = server_of(folder)
    told = dict(DeviceNotices(TOPICS).keys_due(server.group()))
    keys = KnownKeys(pi)
    keys.receive_group_key(TOPICS.key("pi-1"), told[TOPICS.key("pi-1")])
    assert keys.group_key(server.group().epoch) == server.group().key


@pytest.mark.parametrize("seconds", [0.0, 6e8, 1.7e9])
def test_a_clock_before_this_program_makes_no_keys(tmp_path, monkeypatch, seconds):
    """An authority that was made at the clock's epoch had ended before any board looked at it."""
    found_fleet(tmp_path / "lab", NewFleet("lab", "127.0.0.1"))
    enroll(tmp_path / "lab", "pi", days=30)
    monkeypatch.setattr(time, "time", lambda: seconds)
    attempts = (
        lambda: found_fleet(tmp_path / "other", NewFleet("lab", "127.0.0.1")),
        lambda: enroll(tmp_path / "lab", "pi-2"),
        lambda: renew(tmp_path / "lab", ["pi"], days=30),
    )
    for attempt in attempts:
        with pytest.raises(ConfigError, match="the clock of this machine shows"):
            attempt()
    assert not (tmp_path / "other" / "operator.pem").exists()


def test_one_command_at_a_time_changes_a_folder(folder):
    """Or one that revokes would undo what another does; the second is told to come again."""
    enroll(folder, "pi-1")
    with authority.changing(folder), pytest.raises(ConfigError, match="try again"):
        revoke(folder, "pi-1")
    revoke(folder, "pi-1")


@pytest.mark.parametrize("days", [-1, 10**12])
def test_an_end_beyond_all_bounds_is_a_mistake(folder, days):
    """And what was signed before stands: a board would refuse what has such an end, and the list
    with it.
    """
    enroll(folder, "pi-1", days=1)
    before = (folder / REGISTRY).read_bytes()
    for work in (
        lambda: enroll(folder, "pi-1", days=days),
        lambda: renew(folder, ["pi-1"], days=days),
    ):
        with pytest.raises(ConfigError, match="36500 days"):
            work()
    assert (folder / REGISTRY).read_bytes() == before


def test_who_was_revoked_is_not_renewed(folder):
    """It is no device of the fleet any more; to be one again it is enrolled."""
    enroll(folder, "pi-1", days=1)
    revoke(folder, "pi-1")
    with pytest.raises(ConfigError, match="this fleet has no device"):
        renew(folder, ["pi-1"], days=30)
    assert renew(folder, (), days=30) == []


def test_a_board_takes_keys_of_a_fleet_that_was_founded_anew(folder, tmp_path):
    """The operator's key is lost, and the board's folder stays: low numbers count as much as high
    ones.
    """
    old = read_enrolment(enroll(folder, "pi-1"))
    found_fleet(tmp_path / "again", NewFleet("lab", "127.0.0.1"))
    new = read_enrolment(enroll(tmp_path / "again", "pi-1"))
    server = server_of(tmp_path / "again")
    for epoch in (57, 58):
        group = Group(epoch, bytes(32), {"pi-1": public_key(old.sealing[0])})
        for topic, payload in DeviceNotices(TOPICS).keys_due(group):
            KnownKeys(old, tmp_path / "board" / "keys.json").receive_group_key(topic, payload)
    board = KnownKeys(new, tmp_path / "board" / "keys.json")
    for topic, payload in DeviceNotices(TOPICS).keys_due(server.group()):
        board.receive_group_key(topic, payload)
    assert board.group_key(server.group().epoch) == server.group().key
    assert board.group_key(57) is None
    assert board.group_key(58) is not None  # the one before, whose chunks may still be under way


def test_a_board_without_a_clock_gets_in(folder):
    """It begins in 1970, and knows no better before it is connected: every certificate of the fleet
    counts then.
    """
    broker = x509.load_pem_x509_certificate((folder / "broker.pem").read_bytes())
    store = Store([x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())])
    name = x509.DNSName("localhost")
    for when in (
        dt.datetime(1970, 1, 1, 0, 1, tzinfo=dt.timezone.utc),
        dt.datetime.now(dt.timezone.utc),
    ):
        PolicyBuilder().store(store).time(when).build_server_verifier(name).verify(broker, [])
    crl = x509.load_pem_x509_crl(Authority.read(folder).revoked(["1f"]).encode())
    assert crl.last_update_utc.year == 1970


def test_a_server_that_moves_to_another_name_gets_a_certificate_for_it(folder):
    """Boards that were enrolled anew had refused the old name, and only a new fleet had another."""
    (folder / "address").write_text("barn.example:8883\n")
    with pytest.raises(ConfigError, match="not of the form mqtt://"):
        renew_server(folder)
    (folder / "address").write_text("mqtts://barn.example:8883\n")  # as an editor ends a line
    renew_server(folder)
    broker = x509.load_pem_x509_certificate((folder / "broker.pem").read_bytes())
    store = Store([x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())])
    for name in ("barn.example", "localhost"):
        PolicyBuilder().store(store).build_server_verifier(x509.DNSName(name)).verify(broker, [])
    assert read_enrolment(enroll(folder, "pi-1")).broker == "mqtts://barn.example:8883"


def test_the_port_of_boards_is_that_of_the_configuration(folder):
    """The file `address` had kept the port that the fleet was made with."""
    fleet_toml = folder / "fleet.toml"
    port = free_port()

    def broker_of(text):
        fleet_toml.write_text(text)
        return load_config(fleet_toml, FleetConfig).resolved(folder).broker

    made = fleet_toml.read_text()
    assert not list(membership_notices(broker_of(made)))
    changed = broker_of(made.replace("port = 8883", f"port = {port}"))
    assert read_enrolment(enroll(folder, "pi-1")).broker == f"mqtts://127.0.0.1:{port}"
    ((kind, notice),) = membership_notices(changed)
    assert kind == "address-differs"
    assert "enrolled for mqtts://127.0.0.1:8883 do not find the broker" in notice
    assert f"shoal enroll server --folder {folder}" in notice
    renew_server(folder)
    assert not list(membership_notices(changed))
    # A router passes another port on, or the file is of an earlier version.
    (folder / "address").write_text("mqtts://127.0.0.1:8883\n")
    ((_, notice),) = membership_notices(changed)
    assert f"boards are enrolled for port 8883, as {folder}/address says" in notice
    assert f"listens on port {port}" in notice


def test_a_folder_without_the_address_of_its_broker_is_named(folder):
    """It was a traceback; of a pipe, the command waited for the other end."""
    address = folder / "address"
    address.unlink()
    error = r"address cannot be read \(.*; write the broker's address"
    with pytest.raises(ConfigError, match=error):
        enroll(folder, "pi-1")
    address.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=error):
        enroll(folder, "pi-1")
    address.unlink()
    os.mkfifo(address)
    with pytest.raises(ConfigError, match=error):
        enroll(folder, "pi-1")


@pytest.mark.parametrize("damage", ["certificate", "another key"])
def test_a_broker_without_its_certificate_is_not_started(folder, tmp_path, damage):
    """The files are named, and not that nobody answers half a minute later."""
    if damage == "certificate":
        (folder / "broker.pem").write_text(
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
        )
    else:
        found_fleet(tmp_path / "other", NewFleet("other", "127.0.0.1"))
        (folder / "broker.key").write_bytes((tmp_path / "other" / "broker.key").read_bytes())
    with pytest.raises(
        ConfigError,
        match=r"lab/broker\.pem and broker\.key beside it are not a certificate with its key",
    ):
        hosted_broker(
            BrokerConfig(url="mosquitto", identity=folder / "server.enrolment"), "lab", tmp_path
        )


def test_whose_enrolment_has_ended_is_no_member_until_it_is_renewed(folder, monkeypatch):
    """Rounds would ask it and wait for it, and every update of it be refused."""
    enroll(folder, "late", days=1)
    enroll(folder, "ever")
    server = server_of(folder)
    assert set(server.members()) == {"late", "ever"}
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 2 * DAY)
    assert set(server.members()) == {"ever"}
    renew(folder, ["late"], days=3)
    assert set(server_of(folder).members()) == {"late", "ever"}


def test_what_a_board_has_written_out_is_not_written_again(folder, tmp_path, monkeypatch):
    """So that one whose disk is full connects, and says so."""
    enrolment = read_enrolment(enroll(folder, "pi-1"))
    before = enrolment.address(tmp_path / "identity")

    def full(*_):
        raise StorageError("the disk is full")

    monkeypatch.setattr("fleet_protocol.identity.enrolment.write_secret", full)
    assert enrolment.address(tmp_path / "identity") == before
    before.ca_file.write_bytes(b"damaged \xc7")
    with pytest.raises(StorageError):
        enrolment.address(tmp_path / "identity")


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid(), reason="what root writes is another's here"
)
def test_what_root_has_written_out_is_the_agents(folder, tmp_path):
    """`shoal device doctor` is run by root, too; the agent could not read its certificates then,
    and ended for ever.
    """
    state = tmp_path / "state"
    state.mkdir()
    os.chown(state, 65534, 65534)
    written = read_enrolment(enroll(folder, "pi-1")).address(state / "identity")
    assert {
        path.stat().st_uid for path in (written.ca_file, written.key_file, state / "identity")
    } == {65534}
    roots = tmp_path / "etc"
    roots.mkdir()
    (state / "linked").symlink_to(roots)
    read_enrolment(folder / "devices" / "pi-1.enrolment").address(state / "linked")
    assert roots.stat().st_uid == 0  # whoever breaks out of the agent's unit would have had it


def test_a_board_whose_disk_is_full_hears_and_is_heard(folder, tmp_path, monkeypatch):
    """Or it could not say so: what it heard is in memory until it starts again. A server then
    refuses.
    """
    server, board = (
        read_enrolment(path) for path in (folder / "server.enrolment", enroll(folder, "pi-1"))
    )
    says = Signer(server, 7)
    offer, again = (says.seal(TOPICS.task("pi-1"), text) for text in (b"offer", b"again"))

    def full(*_, **__):
        raise StorageError("the disk is full")

    monkeypatch.setattr("fleet_protocol.identity.replay_guard.write_secret", full)
    assert next_session(tmp_path / "session.json") == pytest.approx(time.time(), abs=60)
    patient, strict = (
        ReplayGuard(tmp_path / "heard.json", patient=patient) for patient in (True, False)
    )
    listens = Verifier(board, patient)
    assert listens.open(TOPICS.task("pi-1"), offer).payload == b"offer"
    assert listens.open(TOPICS.task("pi-1"), again).payload == b"again"
    with pytest.raises(RefusedError) as error:
        listens.open(TOPICS.task("pi-1"), offer)
    assert error.value.reason is RefusalReason.REPLAYED
    with pytest.raises(StorageError):
        Verifier(board, strict).open(TOPICS.task("pi-1"), offer)


def test_what_two_threads_say_is_heard_in_its_order(folder):
    """Predictions are answered by a thread of their own: whichever came second had been refused, as
    if replayed.
    """
    server, board = (
        read_enrolment(path) for path in (folder / "server.enrolment", enroll(folder, "pi-1"))
    )
    sent = []
    keys = KnownKeys(board)
    waits = itertools.cycle((0.002, 0.0))
    inner = SimpleNamespace(
        publish=lambda _topic, payload, **_: (time.sleep(next(waits)), sent.append(payload))
    )
    signer = Signer(board, int(time.time()))
    says = SignedTransport(inner, Member(board, folder), signer, keys, DeviceNotices(TOPICS))
    threads = [
        threading.Thread(
            target=lambda: [says.publish(TOPICS.reply("pi-1"), bytes(2000)) for _ in range(100)]
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    hears = Verifier(server, ReplayGuard())
    assert len([hears.open(TOPICS.reply("pi-1"), payload) for payload in sent]) == 200


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("insecure = true", r"insecure has no effect beside \[identity\]"),
        ('broker = "mqtts://me:secret@127.0.0.1"', "the login in broker has no effect beside"),
        ('tls = { ca_file = "none.pem" }', r"\[tls\] has no effect beside"),
        ('identity.file = "lab/server.enrolment"', "is the enrolment of a server, not of a device"),
    ],
)
def test_what_has_no_place_beside_an_identity_is_an_error(folder, tmp_path, line, words):
    """Of a board: it had been passed over; and the server's own enrolment would have been on every
    card.
    """
    enroll(folder, "pi-1")
    member = "" if "identity" in line else 'identity.file = "lab/devices/pi-1.enrolment"\n'
    text = f'state_dir = "state"\n{member}{line}\ndata = {{ kind = "npz", path = "d.npz" }}\n'
    (tmp_path / "device.toml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_device_config(tmp_path / "device.toml")


@pytest.mark.parametrize(
    "host", ["192.168.1.10:8883", "mqtts://foo", "b\u00fccher.local", "a" * 65, ""]
)
def test_a_host_that_no_certificate_could_have_founds_nothing(tmp_path, host):
    """It had ended in a traceback, with a folder that the next try found not empty, or in an
    address of no use.
    """
    with pytest.raises(ConfigError, match="--host"):
        found_fleet(tmp_path / "lab", NewFleet("lab", host))
    assert not (tmp_path / "lab").exists()


def test_an_operators_key_with_a_passphrase_is_named(folder):
    """It was a traceback."""
    secret = serialization.BestAvailableEncryption(b"open sesame")
    raw = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret)
    (folder / "operator.pem").write_bytes(Ed25519PrivateKey.generate().private_bytes(*raw))
    with pytest.raises(ConfigError, match=r"cannot read the operator's key .*operator\.pem"):
        enroll(folder, "pi-1")


def test_a_fleet_can_be_founded_at_an_address_of_ipv6(tmp_path):
    """Its boards find the broker, whose certificate has the address; the broker listens there."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    folder = tmp_path / "six"
    found_fleet(folder, NewFleet("six", "::1", listen="::"))
    assert read_enrolment(enroll(folder, "pi-1")).broker == "mqtts://[::1]:8883"
    broker = x509.load_pem_x509_certificate((folder / "broker.pem").read_bytes())
    names = broker.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert ip_address("::1") in names.get_values_for_type(x509.IPAddress)
    config = BrokerConfig(
        url="mosquitto", identity=folder / "server.enrolment", listen="::1", port=free_port()
    )
    with hosted_broker(config, "six", tmp_path / "broker") as hosted:
        assert hosted.alive
        assert hosted.url == str(broker_address(config)) == f"mqtts://[::1]:{config.port}"


def test_papers_with_what_nobody_knows_are_refused(folder, tmp_path):
    """Unknown fields, outside the signature and inside, and lists of another fleet's name."""
    board = Membership(read_enrolment(enroll(folder, "pi-1", days=1)), tmp_path / "papers.json")
    papers = Papers.model_validate_json(server_of(folder).papers()["pi-1"])
    for data in (
        papers.to_bytes()[:-1] + b',"more":1}',
        papers.to_bytes().replace(papers.revoked.encode(), b""),
        papers.to_bytes().replace(papers.revoked.encode(), b"00" * 2**20 + b"00"),
        b"[" * 100_000,
    ):
        with pytest.raises(RefusedError) as caught:
            board.accept(data)
        assert caught.value.reason is RefusalReason.MALFORMED
    assert board.revocations.counter == 0


def test_a_list_of_revocations_that_is_too_long_still_counts_at_the_server(folder, tmp_path):
    """The operator is told what to do, and the server goes on with the list that boards were told
    last.
    """
    for name in ("pi-1", "pi-2", "pi-3"):
        enroll(folder, name)
    revoke(folder, "pi-2")
    told = server_of(folder).papers()["pi-1"]
    many = {f"device-{number:06d}": 1_700_000_000 for number in range(45_000)}
    registry = read_registry(folder)
    registry.model_copy(update={"since": {**registry.since, **many}}).write(folder)
    with pytest.raises(
        ConfigError, match=r"list of 45002 revocations .* create the fleet again with `shoal init`"
    ):
        revoke(folder, "pi-3")
    server = server_of(folder)
    assert server.papers()["pi-1"] == told
    assert server.revoked(
        certificate_of(read_enrolment(folder / "devices" / "pi-3.enrolment"), tmp_path)
    )
    found_fleet(tmp_path / "anew", NewFleet("lab", "127.0.0.1"))
    enroll(tmp_path / "anew", "pi-1")
