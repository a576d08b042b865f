"""Whoever may write every topic of a broker keeps no board from what is for it, and a renewed one
is there again.
"""

import contextlib
import queue
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from broker_server.service import mosquitto_files
from broker_server.service.authority import enroll, found_fleet, renew
from broker_server.service.membership import broker_address, hosted_broker, member_of
from broker_server.service.new_fleet import NewFleet
from broker_server.service.server import Server
from broker_server.settings.broker import BrokerConfig
from broker_server.store import Store, queries
from fleet_protocol.errors import RefusalReason
from fleet_protocol.identity import envelope
from fleet_protocol.identity.enrolment import read_enrolment
from fleet_protocol.identity.member import Member
from fleet_protocol.link import Link
from fleet_protocol.messages import DeviceStatus
from fleet_protocol.topics import Topics
from fleet_protocol.transport import BrokerAddress, Connected, Received, Rejected, open_transport
from shoal.local_fleet import LocalDevice
from tests.brokers import free_port, mosquitto_broker, needs_mosquitto
from tests.fleet.boards import until

TOPICS = Topics("test")
PATIENCE_SECONDS = 120.0


def heard(inbox, kind, topic):
    """The next event of a kind on a topic."""
    while True:
        event = inbox.get(timeout=PATIENCE_SECONDS)
        if isinstance(event, kind) and event.topic == topic:
            return event


@pytest.mark.attack(
    "outsider",
    "Replaces the retained messages that contain a device's key and papers with its own messages",
    "refused as `forged`; the server sends both again",
    "2026-11-23",
)
def test_what_a_stranger_puts_in_the_brokers_keeping_is_said_over_again(tmp_path):
    """Retained words in place of the fleet's key and of papers: a board that comes later is told
    both again.
    """
    with mosquitto_broker(tmp_path) as broker, contextlib.ExitStack() as stack:
        folder = tmp_path / "lab"
        found_fleet(folder, NewFleet("test", "127.0.0.1", broker.port, broker.url))
        enrolment = read_enrolment(enroll(folder, "pi-1"))
        config = BrokerConfig(url=broker.url, identity=folder / "server.enrolment")
        at_server = queue.SimpleQueue()
        at_board = queue.SimpleQueue()

        def opened(member, name, inbox):
            link = open_transport(BrokerAddress.parse(broker.url), name, inbox, member=member)
            stack.callback(link.close)
            link.connect(30)
            return link

        server = opened(member_of(config), "server", at_server)
        server.subscribe(TOPICS.profile("+"))
        chunk = (TOPICS.blob("0" * 64, 0), b"a frame")
        server.publish_stream([chunk], time.monotonic() + PATIENCE_SECONDS)
        server.drain(time.monotonic() + PATIENCE_SECONDS)
        stranger = Link(BrokerAddress.parse(broker.url), "stranger", queue.SimpleQueue())
        stack.callback(stranger.close)
        stranger.connect(30)
        for topic in (TOPICS.key("pi-1"), TOPICS.papers("pi-1")):
            stranger.publish(topic, b"not what you wait for", retain=True)
        stranger.drain(time.monotonic() + PATIENCE_SECONDS)
        member = Member(enrolment, tmp_path / "board", remembers=True)
        board = opened(member, "board", at_board)
        board.subscribe(TOPICS.blob_filter("0" * 64))
        for topic in (TOPICS.papers("pi-1"), TOPICS.key("pi-1")):
            assert heard(at_board, Rejected, topic).error.reason is RefusalReason.FORGED
        board.publish(TOPICS.profile("pi-1"), b"I am here")
        heard(at_server, Received, TOPICS.profile("pi-1"))
        server.publish_stream([chunk], time.monotonic() + PATIENCE_SECONDS)
        assert heard(at_board, Received, chunk[0]).payload == chunk[1]
        assert (member.folder / "papers.json").exists()


@pytest.mark.attack(
    "outsider",
    "Leaves an old retained status of a device in the broker for the next server",
    "refused as `replayed`; the device counts as online",
    "2026-11-28",
)
def test_an_old_status_does_not_count_at_a_server_that_has_just_started(tmp_path):
    """A stranger puts a board's earlier status into the keeping of the broker: the next server does
    not take the board for absent.
    """
    with mosquitto_broker(tmp_path) as broker, contextlib.ExitStack() as stack:
        folder = tmp_path / "lab"
        found_fleet(folder, NewFleet("test", "127.0.0.1", broker.port, broker.url))
        enrolment = read_enrolment(enroll(folder, "pi-1"))
        config = BrokerConfig(url=broker.url, identity=folder / "server.enrolment")
        address = BrokerAddress.parse(broker.url)
        topic = TOPICS.status("pi-1")
        at_stranger = queue.SimpleQueue()
        stranger = Link(address, "stranger", at_stranger)
        member = Member(enrolment, tmp_path / "board", remembers=True)
        board = open_transport(address, "board", queue.SimpleQueue(), member=member)
        for link in (stranger, board):
            stack.callback(link.close)
            link.connect(30)
        stranger.subscribe(topic)
        board.publish(topic, b"away", retain=True)
        old = heard(at_stranger, Received, topic).payload

        def server():
            inbox = queue.SimpleQueue()
            member = replace(member_of(config), saves_counters=True)
            link = open_transport(address, "server", inbox, member=member)
            stack.callback(link.close)
            link.connect(30)
            link.subscribe(topic)
            return link, inbox

        first, at_first = server()
        board.publish(topic, b"here", retain=True)
        while heard(at_first, Received, topic).payload != b"here":
            pass
        first.close()
        stranger.publish(topic, old, retain=True)
        stranger.drain(time.monotonic() + PATIENCE_SECONDS)
        _, at_second = server()
        assert heard(at_second, Rejected, topic).error.reason is RefusalReason.REPLAYED
        board.publish(topic, b"here still", retain=True)
        assert heard(at_second, Received, topic).payload == b"here still"


@contextlib.contextmanager
def two_members(tmp_path):
    """A broker that the server would start, with the enrolments of two devices."""
    needs_mosquitto()
    folder = tmp_path / "lab"
    port = free_port()
    found_fleet(folder, NewFleet("test", "127.0.0.1", port))
    enrolments = [read_enrolment(enroll(folder, name)) for name in ("pi-1", "pi-2")]
    config = BrokerConfig(url="mosquitto", port=port, identity=folder / "server.enrolment")
    with hosted_broker(config, "test", tmp_path / "broker"):
        yield config, *enrolments


@pytest.mark.attack(
    "member",
    "Connects with another device's session name, to disconnect that device",
    "it cannot, because the session name is derived from a secret; the other device stays "
    "connected",
    "2026-11-28",
)
def test_no_member_takes_the_session_of_another(tmp_path):
    """Whoever connected under a board's guessable name had it disconnected, for as long as they
    liked.
    """
    with two_members(tmp_path) as (config, one, other), contextlib.ExitStack() as stack:

        def opened(link):
            stack.callback(link.close)
            link.connect(30)
            return link

        heard = queue.SimpleQueue()
        member = Member(one, tmp_path / "one", remembers=True)
        board = opened(
            open_transport(one.address(tmp_path / "tls-1"), "shoal-test-pi-1", heard, member=member)
        )
        opened(Link(other.address(tmp_path / "tls-2"), "shoal-test-pi-1", queue.SimpleQueue()))
        board.subscribe(TOPICS.task("pi-1"))
        opened(
            open_transport(
                broker_address(config), "server", queue.SimpleQueue(), member=member_of(config)
            )
        ).publish(TOPICS.task("pi-1"), b"still here")
        events = []
        while not events or not isinstance(events[-1], Received):
            events.append(heard.get(timeout=PATIENCE_SECONDS))
        assert [type(event) for event in events] == [Connected, Received]
        board.close()
        again = queue.SimpleQueue()
        opened(
            open_transport(one.address(tmp_path / "tls-1"), "shoal-test-pi-1", again, member=member)
        )
        assert again.get(timeout=PATIENCE_SECONDS) == Connected(session_present=True)


@pytest.mark.attack(
    "member",
    "Subscribes to everything and disconnects, so that the broker stores all messages",
    "Mosquitto stores at most 512 MB for the session",
    "2026-11-23",
)
def test_what_waits_in_mosquitto_for_a_member_that_is_away_is_bounded(tmp_path, monkeypatch):
    """A member that subscribes to all weights and leaves had the broker keep them in memory,
    100,000 chunks.
    """
    monkeypatch.setattr(
        mosquitto_files,
        "_LISTENER",
        mosquitto_files._LISTENER.replace("bytes 536870912", "bytes 500000"),
    )
    with two_members(tmp_path) as (config, one, _), contextlib.ExitStack() as stack:

        def away():
            heard = queue.SimpleQueue()
            link = Link(one.address(tmp_path / "tls"), "ghost", heard)
            link.connect(30)
            link.subscribe(TOPICS.blob_filter("0" * 64))
            return link, heard

        away()[0].close()
        server = Link(broker_address(config), "server", queue.SimpleQueue())
        stack.callback(server.close)
        server.connect(30)
        messages = [(TOPICS.blob("0" * 64, index), bytes(50_000)) for index in range(80)]
        server.publish_stream(messages, time.monotonic() + PATIENCE_SECONDS)
        server.drain(time.monotonic() + PATIENCE_SECONDS)
        link, heard = away()
        stack.callback(link.close)
        server.publish(TOPICS.blob("0" * 64, 99), b"the last")
        kept = 0
        while (event := heard.get(timeout=PATIENCE_SECONDS)) and getattr(
            event, "payload", b""
        ) != b"the last":
            kept += isinstance(event, Received)
        assert 0 < kept < 40


@pytest.mark.slow
def test_a_board_that_is_renewed_after_its_end_says_that_it_is_there(ground, monkeypatch):
    """A real agent that waits: the server, which took nothing of it, knows it without a word from
    anybody else.
    """
    needs_mosquitto()
    port = free_port()
    folder = ground.folder / "lab"
    found_fleet(folder, NewFleet("test", "127.0.0.1", port, "mosquitto"))
    path = enroll(folder, "device-0", days=1)
    monkeypatch.setattr(envelope, "time", SimpleNamespace(time=lambda: time.time() + 2 * 24 * 3600))
    config = BrokerConfig(url="mosquitto", port=port, identity=folder / "server.enrolment")
    device = LocalDevice("device-0", ground.data / "device-0.npz", 1.0, enrolment=path)

    def until(what):
        patience = time.monotonic() + PATIENCE_SECONDS
        while not what() and time.monotonic() < patience:
            threading.Event().wait(0.1)
        assert what()

    def refused():
        with contextlib.closing(Store(ground.folder / "store", read_only=True)) as store:
            return any("has expired" in event.detail for event in queries.log(store))

    with Server("test", ground.folder / "store", config) as server, contextlib.ExitStack() as stack:
        serving = threading.Thread(target=server.serve)
        serving.start()
        stack.callback(serving.join, 60)
        stack.callback(server.stop)
        fleet = stack.enter_context(ground.fleet(read_enrolment(path).broker, [device]))
        until(refused)
        assert not server._devices.knows("device-0")
        renew(folder, ["device-0"], days=30)
        until(lambda: server._devices.knows("device-0"))
        fleet.check()


@pytest.mark.attack(
    "outsider",
    "Leaves false retained statuses of devices in the broker",
    "the server asks these devices for their status, and then selects them",
    "2026-11-28",
)
@pytest.mark.slow
@pytest.mark.parametrize("words", ["offline", "nonsense"])
def test_retained_statuses_of_a_stranger_hide_no_board(ground, tmp_path, words):
    """They hid boards from the next server for up to ten minutes."""
    with mosquitto_broker(tmp_path) as broker, contextlib.ExitStack() as stack:
        folder = tmp_path / "lab"
        found_fleet(folder, NewFleet("test", "127.0.0.1", broker.port, broker.url))
        own = enroll(folder, "pi-1")
        config = BrokerConfig(url=broker.url, identity=folder / "server.enrolment")
        device = LocalDevice("pi-1", ground.data / "device-0.npz", 1.0, enrolment=own)
        stack.enter_context(ground.fleet(broker.url, [device]))
        log = ground.folder / "devices" / "pi-1.log"
        until(lambda: "state=idle" in log.read_text())
        stranger = Link(BrokerAddress.parse(broker.url), "stranger", queue.SimpleQueue())
        stack.callback(stranger.close)
        stranger.connect(30)
        message = DeviceStatus(fleet="test", device="pi-1", online=False, state="stopped")
        payload = message.to_bytes() if words == "offline" else b"nonsense"
        for topic in (TOPICS.status("pi-1"), TOPICS.profile("pi-1")):
            stranger.publish(topic, payload, retain=True)
        stranger.drain(time.monotonic() + 30)
        run_config = ground.config(broker.url, rounds=1, min_devices=1, wait_seconds=30.0)
        run_config = run_config.model_copy(update={"broker": config})
        with Server("test", ground.folder / "store", config) as server:
            assert server.run(run_config).status == "finished"
