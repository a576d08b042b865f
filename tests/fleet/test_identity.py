"""An enrolled fleet among strangers: it trains over TLS, and what an outsider or another device
says in its place is refused, named and counted, on a broker that lets everybody read and write
everything.
"""

import contextlib
import hashlib
import os
import queue
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from broker_server.service.authority import enroll, found_fleet, renew, renew_server, revoke
from broker_server.service.chunk_trial import TRIAL_DIGEST
from broker_server.service.launch import submit
from broker_server.service.membership import broker_address, hosted_broker
from broker_server.service.new_fleet import NewFleet
from broker_server.service.server import Server
from broker_server.settings.broker import BrokerConfig
from broker_server.store import Store, queries
from fleet_protocol import control, requests
from fleet_protocol.blobs import decode_chunk
from fleet_protocol.errors import RefusalReason, TransportError
from fleet_protocol.identity import envelope
from fleet_protocol.identity.certificate import issue, read_certificate
from fleet_protocol.identity.chunks import ChunkSigner, ChunkVerifier, MissingKeyError, shared_topic
from fleet_protocol.identity.enrolment import Enrolment, read_enrolment, write_secret
from fleet_protocol.identity.envelope import Signer, Verifier
from fleet_protocol.identity.group import KnownKeys
from fleet_protocol.identity.member import Member
from fleet_protocol.identity.replay_guard import ReplayGuard
from fleet_protocol.identity.sealing import new_key
from fleet_protocol.link import Link
from fleet_protocol.messages import Cancel, DeviceStatus, Offer, Refuse
from fleet_protocol.topics import BlobTopic, DeviceTopic, Topics, UploadTopic
from fleet_protocol.transport import (
    BrokerAddress,
    Connected,
    Disconnected,
    OperatorNotice,
    Received,
    open_transport,
)
from shoal.local_fleet import LocalDevice
from tests.brokers import embedded_broker, free_port, mosquitto_broker, needs_mosquitto
from tests.fleet.conftest import WIDTHS, Watcher

TOPICS = Topics("test")
HOSTED = BrokerConfig(url="mosquitto")
NAMES = tuple(f"device-{i}" for i in range(len(WIDTHS)))


def founded(ground, port):
    """A fleet's folder with its devices enrolled."""
    folder = ground.folder / "lab"
    found_fleet(folder, NewFleet("test", "127.0.0.1", port))
    return folder, {name: enroll(folder, name) for name in NAMES}


def members(ground, enrolments):
    return [
        LocalDevice(name, ground.data / f"{name}.npz", width, enrolment=enrolments[name])
        for name, width in zip(enrolments, WIDTHS, strict=True)
    ]


def identified(ground, folder, broker: BrokerConfig, **rounds):
    config = ground.config("embedded", **rounds)
    return config.model_copy(
        update={"broker": broker.model_copy(update={"identity": folder / "server.enrolment"})}
    )


class Outsider:
    """A client of the broker who reads everything, and says again, and says falsely, whatever it
    can.

    Args:
        url: of a broker that lets it.
        insider: whose keys it signs with, as a device that is enrolled and bad; None for no key at
            all.
    """

    def __init__(self, url: str, insider: Enrolment | None = None) -> None:
        self.tried: Counter[str] = Counter()
        self.chunks: list[bytes] = []
        self._insider = Signer(insider, 2**31) if insider is not None else None
        self._chunks = ChunkSigner(insider, KnownKeys(insider)) if insider is not None else None
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._mine: set[bytes] = set()
        self._stop = threading.Event()
        self._link = Link(
            BrokerAddress.parse(url), f"outsider-{os.getpid()}-{id(self)}", self._inbox
        )
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self):
        self._link.connect(10)
        self._link.subscribe(f"{TOPICS.root}/#")
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(10)
        self._link.close()

    def say(self, kind: str, topic: str, payload: bytes, *, retain: bool = False) -> None:
        if self.tried[kind] >= 5:
            return
        if self._insider is not None:
            payload = self._insider.seal(topic, payload)
        self.tried[kind] += 1
        self._mine.add(hashlib.sha256(payload).digest())
        self._link.publish(topic, payload, retain=retain)

    def _again(self, kind: str, event: Received) -> None:
        if self.tried[kind] < 5:
            self.tried[kind] += 1
            self._mine.add(hashlib.sha256(event.payload).digest())
            self._link.publish(event.topic, event.payload)

    def _work(self):
        while not self._stop.is_set():
            with contextlib.suppress(queue.Empty):
                event = self._inbox.get(timeout=0.1)
                if (
                    isinstance(event, Received)
                    and hashlib.sha256(event.payload).digest() not in self._mine
                ):
                    self._attack(event)

    def _attack(self, event: Received) -> None:
        topic = TOPICS.parse(event.topic)
        said = event.payload
        if isinstance(topic, BlobTopic | UploadTopic):
            self.chunks.append(said)
            self.say("poisoned chunk", event.topic, said[:-4] + b"evil")
            if self._chunks is not None and self.tried["chunk of its own"] < 5:
                self.tried["chunk of its own"] += 1
                ((own),) = self._chunks.sign_list(
                    shared_topic(event.topic), ((event.topic, said[-100:]),), None
                )
                self._mine.add(hashlib.sha256(own).digest())
                self._link.publish(event.topic, own)
        elif isinstance(topic, DeviceTopic):
            names = {"fleet": "test", "run": "r1", "round": 1, "task": "t1"}
            at = said.find(b'{"v"')
            if topic.channel == "task":
                self._again("replayed offer", event)
                self.say("forged cancel", event.topic, Cancel(**names, reason="over").to_bytes())
                if at > 0 and b'"offer"' in said:
                    self.say(
                        "forged offer", event.topic, Offer.model_validate_json(said[at:]).to_bytes()
                    )
                self.say("moved message", TOPICS.task("device-0"), said)
            elif topic.channel == "reply" and at > 0:
                self._again("replayed reply", event)
                refuse = Refuse(
                    **names, device=topic.device, reason=RefusalReason.FAILED, detail="no"
                )
                self.say("forged refuse", event.topic, refuse.to_bytes())
            elif topic.channel == "status":
                self.say(
                    "forged status",
                    event.topic,
                    said[at:].replace(b'"online":true', b'"online":false'),
                )
        elif event.topic == TOPICS.server_events:
            self._again("replayed event", event)
            at = said.find(b'{"run"')
            started = control.parse_run_event(said[at:]) if at > 0 else None
            if isinstance(started, control.RunStarted):
                end = control.RunFinished(
                    run=started.run,
                    seconds=1,
                    status="finished",
                    version=9,
                    rounds=9,
                    wire_bytes=0,
                    payload_bytes=0,
                )
                self.say("forged end", event.topic, end.to_bytes())
                request = requests.RunRequest(request="r1", fleet="test")
                self.say("forged request", TOPICS.server_control, request.to_bytes())


def counted(config):
    with contextlib.closing(Store(config.store, read_only=True)) as store:
        return queries.status(store, None).refusals


@pytest.mark.attack(
    "outsider",
    "Connects to the broker without a client certificate",
    "the broker refuses the connection",
    "2026-11-28",
)
def test_an_enrolled_fleet_trains_over_tls_and_lets_nobody_else_in(ground):
    """The Mosquitto that the server starts speaks TLS, and asks for a certificate that `shoal
    enroll` has made.
    """
    needs_mosquitto()
    port = free_port()
    folder, enrolments = founded(ground, port)
    config = identified(ground, folder, HOSTED.model_copy(update={"port": port}), rounds=2)
    watcher = Watcher()
    doors = {
        "no TLS": BrokerAddress("127.0.0.1", port),
        "no login": BrokerAddress.parse(f"mqtts://127.0.0.1:{port}", ca_file=folder / "ca.pem"),
        "a wrong word": BrokerAddress.parse(
            f"mqtts://device-0:guess@127.0.0.1:{port}", ca_file=folder / "ca.pem"
        ),
        "an unknown authority": BrokerAddress.parse(f"mqtts://device-0:guess@127.0.0.1:{port}"),
    }
    with (
        Server(config.fleet, config.store, config.broker, listener=watcher) as server,
        ground.fleet(
            read_enrolment(enrolments["device-0"]).broker, members(ground, enrolments)
        ) as fleet,
    ):
        for name, address in doors.items():
            with pytest.raises(TransportError):
                pytest.fail(f"{name}: in") if Link(address, "x", queue.SimpleQueue()).connect(
                    1.0
                ) is None else None
        assert server.run(config).status == "finished"
        fleet.check()
    assert [len(event.merged) for event in watcher.events_of(control.RoundClosed)] == [
        len(WIDTHS)
    ] * 2
    assert not watcher.events_of(control.UpdateRefused)


@pytest.mark.attack(
    "outsider",
    "Sends offers, cancellations, acknowledgements, chunks and run requests in the name of the "
    "server or of a device",
    "refused as `forged` or `replayed`, and counted; the run ends as it would without them",
    "2026-11-22",
)
@pytest.mark.slow
@pytest.mark.parametrize("who", ["outsider", "insider"])
def test_whatever_is_said_in_anothers_place_is_refused_and_counted(ground, tmp_path, who):
    """Offers, refusals, statuses, chunks, requests and events, forged, moved and said again: the
    run ends as ever.

    The insider signs with the key of a device that is enrolled, and may still say nothing in
    another's place.
    """
    with mosquitto_broker(tmp_path) as broker, contextlib.ExitStack() as stack:
        folder, enrolments = founded(ground, broker.port)
        bad = read_enrolment(enroll(folder, "bad")) if who == "insider" else None
        config = identified(ground, folder, BrokerConfig(url=broker.url))
        watcher = Watcher()
        attacker = stack.enter_context(Outsider(broker.url, bad))
        server = Server(config.fleet, config.store, config.broker, own=config, listener=watcher)
        stack.enter_context(server)
        serving = threading.Thread(target=server.serve)
        serving.start()
        stack.callback(serving.join, 20)
        stack.callback(server.stop)
        fleet = stack.enter_context(ground.fleet(broker.url, members(ground, enrolments)))
        elsewhere = config.model_copy(update={"store": ground.folder / "elsewhere"})
        finished = submit(elsewhere)  # over MQTT
        fleet.check()
        logs = "".join(
            (ground.folder / "devices" / f"{name}.log").read_text() for name in enrolments
        )
    assert (finished.status, finished.rounds) == ("finished", 3)
    assert len(attacker.chunks) > 3 * len(WIDTHS)
    plain = (
        b"__metadata__",
        b"data_offsets",
        b"format_version",
    )  # what weights and manifests say that can be read
    assert not any(word in said for said in attacker.chunks for word in plain)
    assert [len(event.merged) for event in watcher.events_of(control.RoundClosed)] == [
        len(WIDTHS)
    ] * 3
    expected = {
        "poisoned chunk",
        "forged cancel",
        "forged offer",
        "forged refuse",
        "forged status",
        "replayed offer",
    }
    assert (
        expected
        | {"replayed reply", "moved message", "replayed event", "forged end", "forged request"}
        <= attacker.tried.keys()
    )
    refusals = counted(config)
    assert refusals["forged"] >= 5
    assert refusals["replayed"] >= 1
    assert "refused, forged" in logs
    assert "refused, replayed" in logs
    assert not any(event.device in enrolments for event in watcher.events_of(control.UpdateRefused))


@pytest.mark.attack(
    "broker",
    "Searches all messages for weights and updates",
    "only sizes, names and times are visible",
    "2026-11-28",
)
@pytest.mark.slow  # tests/fleet_protocol/test_sealing.py sees what opens and what does not
@pytest.mark.parametrize("broker_of", [embedded_broker, mosquitto_broker])
def test_a_broker_reads_sizes_only_and_a_revoked_device_nothing_more(ground, tmp_path, broker_of):  # noqa: C901
    """Whoever hears every topic reads no chunk; who was a member, and kept its key, none of a round
    after that.
    """
    with broker_of(tmp_path) as broker:
        folder, enrolments = founded(ground, broker.port)
        gone = read_enrolment(enroll(folder, "gone"))
        inbox = queue.SimpleQueue()
        config = identified(ground, folder, BrokerConfig(url=broker.url))
        closed: list[control.RoundClosed] = []

        def listen(event):
            if isinstance(event, control.RoundClosed):
                closed.append(event)
                if len(closed) == 1:
                    revoke(folder, "gone")
                    threading.Event().wait(1.1)  # the server looks once a second

        spy = Link(BrokerAddress.parse(broker.url), "spy", inbox)
        spy.connect(10)
        spy.subscribe(f"{TOPICS.root}/#")
        with (
            Server(config.fleet, config.store, config.broker, listener=listen) as server,
            ground.fleet(broker.url, members(ground, enrolments)) as fleet,
        ):
            assert server.run(config).status == "finished"
            fleet.check()
        spy.close()
    assert [len(event.merged) for event in closed] == [len(WIDTHS)] * 3
    heard = []
    with contextlib.suppress(queue.Empty):
        while True:
            heard.append(inbox.get_nowait())
    keys = KnownKeys(gone)
    read = set()
    unread = set()
    verifier = Verifier(gone, ReplayGuard())
    for event in heard:
        if isinstance(event, Received) and event.topic == TOPICS.key("gone"):
            keys.receive_group_key(event.topic, verifier.open(event.topic, event.payload).payload)
    chunks = ChunkVerifier(gone, verifier, keys)
    plain = (
        b"__metadata__",
        b"data_offsets",
        b"format_version",
    )  # what weights and manifests say that can be read
    for event in heard:
        topic = TOPICS.parse(event.topic) if isinstance(event, Received) else None
        if isinstance(topic, BlobTopic | UploadTopic):
            assert not any(word in event.payload for word in plain)
        if isinstance(topic, BlobTopic) and topic.digest != TRIAL_DIGEST:
            try:
                read.add(decode_chunk(chunks.open(event.topic, event.payload).payload).size)
            except MissingKeyError:
                unread.add(topic.digest)
    assert len(read) > len(WIDTHS)  # of the first round: graphs, manifests and weights
    assert len(unread) == 2 * len(set(WIDTHS))  # weights of the other two


@pytest.mark.slow  # tests/fleet_protocol/test_sealing.py sees what opens and what does not
def test_a_server_that_is_renewed_within_a_round_loses_no_update(ground):
    """Tasks in hand are sealed to the key before, which the new server opens; later ones to the new
    key.
    """
    port = free_port()
    folder, enrolments = founded(ground, port)
    config = identified(ground, folder, HOSTED.model_copy(update={"port": port}))
    watcher = Watcher()
    with ground.fleet(f"mqtts://127.0.0.1:{port}", members(ground, enrolments)) as fleet:
        with Server(config.fleet, config.store, config.broker, listener=watcher) as server:
            watcher.once(lambda event: isinstance(event, control.DeviceAccepted), server.stop)
            assert server.run(config).status == "stopped"
        before = read_enrolment(folder / "server.enrolment").sealing
        assert read_enrolment(renew_server(folder)).sealing[1:] == before
        with Server(config.fleet, config.store, config.broker, listener=watcher) as server:
            assert server.run(config).status == "finished"
        fleet.check()
    first, *others = (len(event.merged) for event in watcher.events_of(control.RoundClosed))
    assert (
        first >= 2
    )  # on a busy machine a board is not back from the broker's end when the others have answered
    assert others == [len(WIDTHS)] * 2
    # Mosquitto has kept the status of the server before, whose key counts no more.
    assert not [
        event for event in watcher.events_of(control.UpdateRefused) if event.device is not None
    ]


@pytest.mark.attack(
    "member",
    "Sends an update that is not sealed, or sealed to another key",
    "refused as `bad-seal`, and counted",
    "2026-11-22",
)
@pytest.mark.slow
@pytest.mark.parametrize("how", ["to an older key", "not at all"])
def test_an_update_that_is_not_sealed_to_the_server_is_refused_and_counted(ground, how):
    """None of its chunks is taken, and the run says why."""
    port = free_port()
    folder, enrolments = founded(ground, port)
    path = folder / "server.enrolment"
    server = read_enrolment(path)
    if how == "not at all":  # what devices hear says nothing of seals
        key = load_pem_private_key((folder / "operator.pem").read_bytes(), None)
        told = read_certificate(bytes.fromhex(server.certificate), key.public_key())
        server = server.model_copy(
            update={"certificate": issue(told.model_copy(update={"sealing": None}), key).hex()}
        )
    else:
        server = server.model_copy(update={"sealing": (new_key(),)})
    write_secret(path, server.model_dump_json())
    config = identified(
        ground, folder, HOSTED.model_copy(update={"port": port}), rounds=1, deadline_seconds=10
    )
    watcher = Watcher()
    with (
        Server(config.fleet, config.store, config.broker, listener=watcher) as server,
        ground.fleet(f"mqtts://127.0.0.1:{port}", members(ground, enrolments)) as fleet,
    ):
        assert server.run(config).status == "failed"
        fleet.check()
    refused = Counter(event.reason for event in watcher.events_of(control.UpdateRefused))
    # On a busy machine a board is not done before the deadline.
    assert RefusalReason.BAD_SEAL in refused
    assert refused.keys() <= {RefusalReason.BAD_SEAL, RefusalReason.LATE}
    assert counted(config)["bad-seal"] >= refused[RefusalReason.BAD_SEAL]


def says_that_it_is_there(enrolment, link, server):
    """Whether the server hears a device within seconds; its certificate lets it in at once, and the
    rules let it speak a second or two later.
    """
    signer = Signer(enrolment, 1)
    topic = TOPICS.status(enrolment.name)
    status = DeviceStatus(fleet="test", device=enrolment.name, online=True, state="idle").to_bytes()
    patience = time.monotonic() + 10
    while not server._devices.knows(enrolment.name) and time.monotonic() < patience:
        link.publish(topic, signer.seal(topic, status))
        threading.Event().wait(0.1)
    return server._devices.knows(enrolment.name)


@pytest.mark.slow
def test_a_broker_that_runs_learns_who_is_a_member(ground):
    """Who is enrolled gets in within seconds, and nobody else is interrupted; who is revoked, or
    has an old enrolment, is put out and stays out.
    """
    needs_mosquitto()
    port = free_port()
    folder = ground.folder / "lab"
    found_fleet(folder, NewFleet("test", "127.0.0.1", port))
    config = identified(ground, folder, HOSTED.model_copy(update={"port": port}))
    first = read_enrolment(enroll(folder, "device-0"))
    inboxes: list[queue.SimpleQueue] = []

    def link(enrolment, name):
        inboxes.append(queue.SimpleQueue())
        return Link(enrolment.address(ground.folder / name), name, inboxes[-1])

    def out(enrolment, name):
        with pytest.raises(TransportError):
            link(enrolment, name).connect(2.0)

    def heard(inbox, kind):
        while not isinstance(inbox.get(timeout=20), kind):
            pass

    with (
        Server(config.fleet, config.store, config.broker) as server,
        contextlib.ExitStack() as stack,
    ):
        serving = threading.Thread(target=server.serve)
        serving.start()
        stack.callback(serving.join, 30)
        stack.callback(server.stop)
        known = link(first, "known")
        stack.callback(known.close)
        known.connect(10)
        newcomer = read_enrolment(enroll(folder, "device-1"))
        second = link(newcomer, "second")
        stack.callback(second.close)
        second.connect(20)
        assert says_that_it_is_there(newcomer, second, server)
        assert known.connected
        assert isinstance(inboxes[0].get_nowait(), Connected)
        assert inboxes[0].empty()  # so it never lost its connection
        renewed = read_enrolment(enroll(folder, "device-0"))
        revoke(folder, "device-1")
        for inbox in inboxes:
            heard(inbox, Disconnected)
        link_again = link(renewed, "renewed")
        stack.callback(link_again.close)
        link_again.connect(20)
        out(first, "first")
        out(read_enrolment(folder / "devices" / "device-1.enrolment"), "revoked")
        assert not known.connected
        assert not second.connected
        assert link_again.connected
    with contextlib.closing(Store(config.store, read_only=True)) as store:
        assert "broker-started" in {event.kind for event in queries.log(store)}


# tests/fleet_protocol/test_papers.py has all of it but the broker and the server's loop
@pytest.mark.slow
def test_a_board_whose_enrolment_has_ended_is_renewed_where_it_stands(tmp_path, monkeypatch):
    """Over TLS, by what the running server carries: refused before, and taken after, with nothing
    done at the board.
    """
    needs_mosquitto()
    port = free_port()
    folder = tmp_path / "lab"
    inbox = queue.SimpleQueue()
    found_fleet(folder, NewFleet("test", "127.0.0.1", port, "mosquitto"))
    enrolment = read_enrolment(enroll(folder, "device-0", days=1))
    monkeypatch.setattr(envelope, "time", SimpleNamespace(time=lambda: time.time() + 2 * 24 * 3600))
    config = BrokerConfig(url="mosquitto", port=port, identity=folder / "server.enrolment")
    status = DeviceStatus(fleet="test", device="device-0", online=True, state="idle").to_bytes()

    def heard(kind, **what):
        while not (
            isinstance(event := inbox.get(timeout=60), kind) and what.items() <= vars(event).items()
        ):
            pass

    with Server("test", tmp_path / "store", config) as server, contextlib.ExitStack() as stack:
        serving = threading.Thread(target=server.serve)
        serving.start()
        stack.callback(serving.join, 60)
        stack.callback(server.stop)
        member = Member(enrolment, tmp_path / "board", remembers=True)
        board = open_transport(enrolment.address(member.folder), "board", inbox, member=member)
        stack.callback(board.close)
        board.connect(30)
        board.subscribe(TOPICS.task("device-0"))
        board.publish(TOPICS.status("device-0"), status)
        renew(folder, ["device-0"], days=30)
        heard(OperatorNotice, renewed=True)
        board.publish(TOPICS.status("device-0"), status)
        patience = time.monotonic() + 60
        while not server._devices.knows("device-0") and time.monotonic() < patience:
            threading.Event().wait(0.05)
        assert server._devices.knows("device-0")
        revoke(folder, "device-0")  # what it was renewed to counts for nothing, either
        heard(Disconnected)
        while server._devices.is_online("device-0") and time.monotonic() < patience:
            threading.Event().wait(0.05)
        assert not server._devices.is_online(
            "device-0"
        )  # its will counts for nothing, and the server needs none
    with contextlib.closing(Store(tmp_path / "store", read_only=True)) as store:
        (device,) = store.devices()
        assert (device.online, device.state) == (False, "revoked")
        said = [event.detail for event in queries.log(store) if event.kind == "refused"]
    assert said == ["revoked: a message of device-0, whose enrolment has expired"]


@pytest.mark.attack(
    "member",
    "Subscribes to the tasks and updates of other devices",
    "the broker's access rules prevent it; nothing is delivered",
    "2026-11-22",
)
def test_mosquitto_keeps_a_device_to_its_own_topics_and_dies_with_its_server(tmp_path):
    """By access rules a device neither hears what is for another nor writes under another's
    name.
    """
    needs_mosquitto()
    folder = tmp_path / "lab"
    port = free_port()
    found_fleet(folder, NewFleet("test", "127.0.0.1", port, "mosquitto"))
    one = read_enrolment(enroll(folder, "device-0"))
    enroll(folder, "device-1")
    config = BrokerConfig(url="mosquitto", port=port, identity=folder / "server.enrolment")
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    broker = hosted_broker(config, "test", tmp_path / "broker")
    with broker:
        device = Link(one.address(tmp_path / "one"), "one", inbox)
        server = Link(broker_address(config), "server", queue.SimpleQueue())
        for link in (device, server):
            link.connect(10)
        device.subscribe(f"{TOPICS.root}/#")
        for topic in (
            TOPICS.task("device-1"),
            TOPICS.reply("device-1"),
            TOPICS.server_events,
            TOPICS.task("device-0"),
        ):
            server.publish(topic, b"for its reader")
        device.publish(TOPICS.task("device-0"), b"from the wrong one")
        heard = []
        with contextlib.suppress(queue.Empty):
            while True:
                event = inbox.get(timeout=1.0)
                heard += [(event.topic, event.payload)] if isinstance(event, Received) else []
        for link in (device, server):
            link.close()
    assert heard == [(TOPICS.task("device-0"), b"for its reader")]
    assert not broker.alive
