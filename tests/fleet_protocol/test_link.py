"""The MQTT link against real brokers: sessions, wills, restarts of the broker, and byte counts that
are true.
"""

import contextlib
import queue
import re
import select
import socket
import ssl
import subprocess
import threading
import time
from datetime import datetime, timedelta, timezone

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from broker_server.service.certificates import Authority
from fleet_protocol.errors import ConfigError, RefusalReason, TransportError
from fleet_protocol.link import Link
from fleet_protocol.topics import Topics
from fleet_protocol.transport import (
    BrokerAddress,
    Connected,
    Disconnected,
    Farewell,
    Received,
    Rejected,
)
from tests.brokers import embedded_broker, free_port, mosquitto_broker

WAIT = 60.0  # longer than links wait between two attempts to come back


@pytest.fixture(
    params=[mosquitto_broker, pytest.param(embedded_broker, marks=pytest.mark.slow)],
    ids=["mosquitto", "embedded"],
)
def broker(request, tmp_path):
    with request.param(tmp_path) as running:
        yield running


@contextlib.contextmanager
def linked(url, client_id, **options):
    inbox = queue.SimpleQueue()
    link = Link(BrokerAddress.parse(url), client_id, inbox, **options)
    link.connect(WAIT)
    try:
        yield link, inbox
    finally:
        link.close()


def next_of(inbox, kind, timeout=WAIT, matching=lambda _event: True):
    """The next event of a kind, within a deadline."""
    deadline = time.monotonic() + timeout
    while True:
        event = inbox.get(timeout=max(0.01, deadline - time.monotonic()))
        if isinstance(event, kind) and matching(event):
            return event


def test_what_is_published_arrives_in_order(broker):
    """A stream larger than the send window arrives whole and in order."""
    payloads = [bytes([i]) * 20_000 for i in range(60)]
    with linked(broker.url, "a") as (sender, _), linked(broker.url, "b") as (receiver, inbox):
        receiver.subscribe("t/+")
        sender.publish_stream(
            ((f"t/{i}", p) for i, p in enumerate(payloads)), time.monotonic() + WAIT
        )
        assert [next_of(inbox, Received).payload for _ in payloads] == payloads


def test_large_payloads_pass(broker):
    """A megabyte in one message passes, which a broker's defaults may forbid."""
    with linked(broker.url, "a") as (sender, _), linked(broker.url, "b") as (receiver, inbox):
        receiver.subscribe("big")
        sender.publish("big", bytes(1_000_000))
        assert len(next_of(inbox, Received).payload) == 1_000_000


def test_an_error_in_the_thread_of_the_network_ends_the_connection_and_not_the_thread(
    tmp_path, caplog
):
    """Nobody would start it again: the link connects anew, and the broker repeats what was not
    acknowledged.
    """
    with (
        mosquitto_broker(tmp_path) as broker,
        linked(broker.url, "a") as (sender, _),
        linked(broker.url, "b") as other,
    ):
        receiver, inbox = other
        receiver.subscribe("t")
        take = receiver._client.on_plain_message
        failed = []

        def once(*message):
            if not failed:
                failed.append(message)
                raise MemoryError
            take(*message)

        receiver._client.on_plain_message = once
        sender.publish("t", b"said")
        next_of(inbox, Disconnected)
        assert next_of(inbox, Received).payload == b"said"
        assert receiver.connected
    assert "MemoryError" in caplog.text


def test_messages_of_every_form_are_read_alike(tmp_path):
    """Plain ones past paho's tables of properties; those with properties or of quality 0 go its
    way.
    """
    properties = Properties(PacketTypes.PUBLISH)
    properties.ContentType = "text"
    with (
        mosquitto_broker(tmp_path) as broker,
        linked(broker.url, "a") as (sender, _),
        linked(broker.url, "b") as other,
    ):
        receiver, inbox = other
        by_paho = []
        take = receiver._client.on_message
        receiver._client.on_message = lambda client, data, message: (
            by_paho.append(message.topic),
            take(client, data, message),
        )
        receiver.subscribe("t/#")
        sender.publish("t/plain", b"1")
        sender.publish("t/empty/\u00e4", b"")
        sender._client.publish("t/with", b"2", qos=1, properties=properties)
        sender.publish("t/nought", b"3", qos=0)
        sender.publish("t/large", bytes(300_000))
        found = [next_of(inbox, Received) for _ in range(5)]
    assert by_paho == ["t/with", "t/nought"]
    assert {(item.topic, item.payload) for item in found} == {
        ("t/plain", b"1"),
        ("t/empty/\u00e4", b""),
        ("t/with", b"2"),
        ("t/nought", b"3"),
        ("t/large", bytes(300_000)),
    }


def test_a_large_message_is_put_together_once(broker, monkeypatch):
    """Each piece of one had been copied with all before it: ten of 15 MB kept a server deaf for
    minutes.
    """
    with linked(broker.url, "a") as (sender, _), linked(broker.url, "b") as (receiver, inbox):
        made = []
        take = receiver._client._process_packets

        def counted():
            before = receiver._client._buffer
            result = take()
            if receiver._client._buffer is not before:
                made.append(len(receiver._client._buffer))
            return result

        monkeypatch.setattr(receiver._client, "_process_packets", counted)
        receiver.subscribe("big")
        sender.publish("big", bytes(15_000_000))
        assert len(next_of(inbox, Received).payload) == 15_000_000
    assert sum(size > 1_000_000 for size in made) <= 2


def test_retained_status_and_farewell(broker):
    """Whoever comes later finds the last retained status, which a clean goodbye replaces."""
    with linked(broker.url, "a", will=Farewell("s", b"vanished")) as (sender, _):
        sender.publish("s", b"here", retain=True)
        sender.drain(time.monotonic() + WAIT)
        with linked(broker.url, "b") as (watcher, inbox):
            watcher.subscribe("s")
            assert next_of(inbox, Received) == Received("s", b"here", retained=True)
            sender.close(Farewell("s", b"gone"))
            assert next_of(inbox, Received).payload == b"gone"


@pytest.mark.attack(
    "broker",
    "Publishes an offer, a request, a reply or a chunk as a retained message, so that it is "
    "delivered at every connection",
    "refused as `replayed`, even if the message is signed and is the newest",
    "2026-11-29",
)
def test_only_presence_keys_and_papers_are_retained(broker):
    """Everything else would be an old message at the next start of its receiver."""
    topics = Topics("lab")
    kept = [topics.status("d"), topics.profile("d"), topics.key("d"), topics.papers("d")]
    kept.append(topics.server_status)
    refused = [topics.task("d"), topics.reply("d"), topics.server_control, topics.server_events]
    refused += [topics.blob("0" * 64, 0), topics.upload("t", 0), topics.upload("t", "status")]
    with linked(broker.url, "stranger") as (stranger, _):
        for topic in (*kept, *refused):
            stranger.publish(topic, b"again", retain=True)
        stranger.drain(time.monotonic() + WAIT)
        with linked(broker.url, "board") as (board, inbox):
            for topic in (*kept, *refused):
                board.subscribe(topic)
                event = next_of(inbox, Received if topic in kept else Rejected)
                assert event.topic == topic
                if topic in refused:
                    assert event.error.reason is RefusalReason.REPLAYED
        for topic in (*kept, *refused):
            stranger.publish(topic, b"", retain=True)
        stranger.drain(time.monotonic() + WAIT)


def test_the_will_speaks_for_a_dead_client(broker):
    """A client whose socket dies without a goodbye is announced by its will."""
    proxy = CountingProxy(broker.port)
    with linked(broker.url, "w") as (watcher, inbox):
        watcher.subscribe("s")
        dying = Link(
            BrokerAddress.parse(f"mqtt://127.0.0.1:{proxy.port}"),
            "d",
            queue.SimpleQueue(),
            will=Farewell("s", b"dead"),
        )
        dying.connect(WAIT)
        proxy.close()
        assert next_of(inbox, Received).payload == b"dead"
        dying.close()


def test_a_broker_that_comes_back_is_found_again(broker):
    """After the broker died and lost everything, the link is back, subscribed, and says the session
    is gone.
    """
    with linked(broker.url, "a") as (link, inbox):
        link.subscribe("t")
        broker.stop()
        next_of(inbox, Disconnected)
        link.publish("t", b"sent while it was away")
        broker.start()
        assert next_of(inbox, Connected, matching=lambda e: not e.session_present)
        assert next_of(inbox, Received).payload == b"sent while it was away"


def test_a_session_that_lost_its_subscriptions_gets_them_again(tmp_path):
    """A broker killed before it wrote a subscription comes back with an older session, which it
    calls present.
    """
    with (
        mosquitto_broker(tmp_path, persistent=True) as broker,
        linked(broker.url, "a") as (link, inbox),
        linked(broker.url, "other") as (other, _),
    ):
        for number in range(4):
            other.subscribe(f"change/{number}")  # the session of `a` is on disk by now
        saved = (tmp_path / "mosquitto.db").read_bytes()
        link.subscribe("t")
        broker.stop()
        (tmp_path / "mosquitto.db").write_bytes(saved)
        next_of(inbox, Disconnected)
        broker.start()
        assert next_of(inbox, Connected).session_present
        heard = None
        deadline = time.monotonic() + WAIT
        while heard is None and time.monotonic() < deadline:
            other.publish(
                "t", b"heard"
            )  # over another connection, and so perhaps before the subscription is there
            with contextlib.suppress(queue.Empty):
                heard = next_of(inbox, Received, 1.0).payload
        assert heard == b"heard"


def test_a_login_that_counts_no_longer_is_said_once_and_tried_again(tmp_path, caplog):
    """Its password was changed while it ran, and is changed back: the link says why it is away, and
    returns.
    """
    words = tmp_path / "words"

    def login(password):
        words.unlink(missing_ok=True)
        words.touch(0o600)
        subprocess.run(
            ["mosquitto_passwd", "-b", words, "a", password], check=True, capture_output=True
        )

    login("right")
    more = f"\nallow_anonymous false\npassword_file {words}\n"
    with (
        mosquitto_broker(tmp_path, more=more) as broker,
        linked(f"mqtt://a:right@127.0.0.1:{broker.port}", "a") as both,
    ):
        _, inbox = both
        broker.stop()
        next_of(inbox, Disconnected)
        login("other")
        broker.start()
        deadline = time.monotonic() + WAIT
        while "the broker refuses it (Not authorized)" not in caplog.text:
            assert time.monotonic() < deadline, caplog.text
            threading.Event().wait(0.05)
        broker.stop()
        login("right")
        broker.start()
        assert next_of(inbox, Connected)
    assert caplog.text.count("Not authorized") == 1
    assert "check the login, and what" in caplog.text


def test_a_broker_that_is_down_is_an_error_in_time():
    """Nothing listens: the error says where and what to check, and comes within the timeout."""
    link = Link(BrokerAddress.parse(f"mqtt://127.0.0.1:{free_port()}"), "a", queue.SimpleQueue())
    start = time.monotonic()
    with pytest.raises(
        TransportError, match=r"cannot connect to the broker at mqtt://127\.0\.0\.1.*Is it running"
    ):
        link.connect(1.0)
    assert time.monotonic() - start < 10


@contextlib.contextmanager
def tls_server(folder):
    """Speaks TLS with a certificate of a made-up authority, and nothing else; the authority's file
    and the port.
    """
    authority = Authority.generate("made-up")
    authority.write(folder)
    for name, text in zip(
        ("cert.pem", "key.pem"), authority.issue("broker", hosts=["127.0.0.1"]), strict=True
    ):
        (folder / name).write_text(text)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                plain, _ = listening.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), plain:
                context.wrap_socket(plain, server_side=True).close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(5)


def test_a_certificate_that_is_not_trusted_is_told_from_a_broker_that_is_not_there(tmp_path):
    """A wrong authority, a name that does not exist, and a port where nobody listens have words of
    their own.
    """
    for folder in ("real", "other"):
        (tmp_path / folder).mkdir()
    Authority.generate("other").write(tmp_path / "other")
    with tls_server(tmp_path / "real") as port:
        wrong = {
            "certificate is not trusted.*check ca_file": BrokerAddress.parse(
                f"mqtts://127.0.0.1:{port}", ca_file=tmp_path / "other" / "ca.pem"
            ),
            "the host name is unknown": BrokerAddress.parse("mqtt://nowhere.invalid"),
            "nothing answers there": BrokerAddress.parse(f"mqtt://127.0.0.1:{free_port()}"),
        }
        for message, address in wrong.items():
            with pytest.raises(TransportError, match=message):
                Link(address, "a", queue.SimpleQueue()).connect(1.0)


def test_an_unacknowledged_stream_ends_at_its_deadline(broker):
    """When the broker dies in the middle of a stream, the sender is told instead of waiting for
    ever.
    """
    with linked(broker.url, "a") as (link, inbox):
        broker.stop()
        next_of(inbox, Disconnected)
        with pytest.raises(TransportError, match="not acknowledged"):
            link.publish_stream((("t", b"x") for _ in range(100)), time.monotonic() + 0.5)


def test_counted_bytes_are_the_bytes_on_the_wire(broker):
    """The counters agree with what a proxy in the middle saw, within the packets that carry no
    message.
    """
    proxy = CountingProxy(broker.port)
    with linked(f"mqtt://127.0.0.1:{proxy.port}", "a") as (link, inbox):
        link.subscribe("t/+")
        time_limit = time.monotonic() + WAIT
        link.publish_stream(((f"t/{i}", bytes(50_000)) for i in range(40)), time_limit)
        for _ in range(40):
            next_of(inbox, Received)
        link.drain(time_limit)
        counted = link.wire
        seen = (proxy.upstream, proxy.downstream)
    proxy.close()
    # CONNECT, SUBSCRIBE, pings and the broker's longer acknowledgements are under 1 kB.
    assert abs(seen[0] - counted.sent) < 1000
    assert abs(seen[1] - counted.received) < 1000


@pytest.mark.parametrize(
    "url", ["localhost", "http://x", "mqtt://", "mqtt://h:port", "mqtt://h/path"]
)
def test_addresses_of_another_form_are_refused(url):
    """The error shows the form."""
    with pytest.raises(ConfigError, match=r"mqtt://\[user:password@\]host"):
        BrokerAddress.parse(url)


def test_a_refused_address_keeps_its_password():
    """Whatever is in it: the last @ ends the login."""
    with pytest.raises(ConfigError) as refused:
        BrokerAddress.parse("mqtt://user:p@ssw0rd@lab:1x")
    assert "address 'mqtt://lab:1x' is not" in str(refused.value)


def test_address_defaults_and_secrets():
    """Ports follow the scheme; a password does not show when the address is printed."""
    address = BrokerAddress.parse("mqtts://u:p%40ss@broker.example")
    assert (address.port, address.tls, address.password) == (8883, True, "p@ss")
    assert "p@ss" not in str(address)


def test_missing_certificate_files_are_named(tmp_path):
    """A certificate path that leads nowhere is a configuration error."""
    with pytest.raises(ConfigError, match=r"none\.pem"):
        Link(
            BrokerAddress.parse("mqtts://h", ca_file=tmp_path / "none.pem"),
            "a",
            queue.SimpleQueue(),
        )


@pytest.mark.attack(
    "file",
    "An enrolment has a TLS key with a passphrase, for which OpenSSL would wait at the terminal",
    "refused immediately with an error that names the key",
    "2026-11-29",
)
def test_a_key_with_a_passphrase_is_named_and_waits_for_nobody(tmp_path):
    """Without a question, also where there is a terminal."""
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "pi")])
    now = datetime.now(timezone.utc)
    certificate = x509.CertificateBuilder(
        name, name, private.public_key(), 1, now, now + timedelta(days=1)
    ).sign(private, hashes.SHA256())
    locked = private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (tmp_path / "pi.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (tmp_path / "pi.key").write_bytes(locked)
    files = {"cert_file": tmp_path / "pi.pem", "key_file": tmp_path / "pi.key"}
    with pytest.raises(ConfigError, match=r"pi\.key .*passphrase"):
        Link(BrokerAddress.parse("mqtts://h", **files), "a", queue.SimpleQueue())


class CountingProxy:
    """A TCP proxy in front of a broker that counts the bytes of one connection, and can cut it."""

    def __init__(self, target_port: int) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._target_port = target_port
        self.upstream = self.downstream = 0
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        ready, _, _ = select.select([self._server, self._wake], [], [], WAIT)
        if self._wake in ready or not ready:
            return
        client = self._server.accept()[0]
        broker = socket.create_connection(("127.0.0.1", self._target_port))
        with client, broker:
            while True:
                ready, _, _ = select.select([client, broker, self._wake], [], [], WAIT)
                if self._wake in ready or not ready:
                    return
                for source, sink in ((client, broker), (broker, client)):
                    if source in ready:
                        data = source.recv(65536)
                        if not data:
                            return
                        # Counted first: whoever has read a byte finds it counted.
                        if source is client:
                            self.upstream += len(data)
                        else:
                            self.downstream += len(data)
                        sink.sendall(data)

    def close(self) -> None:
        """Cut the connection without a word."""
        self._waker.send(b"x")
        self._thread.join(WAIT)
        for end in (self._server, self._wake, self._waker):
            end.close()


def _packet(connection):
    kind = connection.recv(1)
    size = 0
    shift = 0
    while kind and (byte := connection.recv(1)[0]) | 1:
        size = size | (byte & 127) << shift
        shift = shift + 7
        if byte < 128:
            break
    return kind[0] if kind else 0xE0, connection.recv(size, socket.MSG_WAITALL) if size else b""


@pytest.mark.attack(
    "outsider",
    "Publishes on a topic that is not valid text",
    "ignored; the server stays connected",
    "2026-11-23",
)
@pytest.mark.parametrize("properties", [b"", b"\x26\0\1k\0\1v"], ids=["plain", "properties"])
def test_a_topic_that_is_no_text_leaves_the_link_alive(properties):
    """A broker that lets it pass ended the network thread, and with it whatever the process would
    have heard.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            connection, _ = listening.accept()
            with connection:
                kind = 0
                while kind != 0xE0:
                    kind, body = _packet(connection)
                    if kind == 0x10:
                        connection.sendall(b"\x20\3\0\0\0")
                    elif kind == 0x82:
                        connection.sendall(b"\x90\4" + body[:2] + b"\0\1")
                        for topic in (b"\xff\xfe", b"ok"):
                            said = (
                                bytes((0, len(topic)))
                                + topic
                                + b"\0\7"
                                + bytes((len(properties),))
                                + properties
                            )
                            connection.sendall(bytes((0x32, len(said))) + said)

        serving = threading.Thread(target=serve)
        serving.start()
        with linked(f"mqtt://127.0.0.1:{listening.getsockname()[1]}", "a") as (link, inbox):
            link.subscribe("#")
            assert next_of(inbox, Received, matching=lambda event: event.topic == "ok")
        serving.join(WAIT)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "retain_available false",
            "Retain not supported.*must retain messages.*retain_available",
        ),
        ("max_qos 0", "QoS not supported.*quality of service 1.*max_qos"),
    ],
)
def test_what_a_broker_lacks_is_named(tmp_path, line, says):
    """The login is not to blame."""
    will = Farewell("shoal/test/a", b"gone")
    with mosquitto_broker(tmp_path, more=line) as broker:
        link = Link(BrokerAddress.parse(broker.url), "a", queue.SimpleQueue(), will=will)
        with pytest.raises(TransportError, match=says):
            link.connect(3.0)


def test_a_packet_larger_than_the_broker_says_it_takes_is_not_sent(tmp_path):
    """Mosquitto would drop it without a word."""
    with (
        mosquitto_broker(tmp_path, more="max_packet_size 5000") as broker,
        linked(broker.url, "a") as (link, _),
    ):
        assert link.packet_bytes == 5000
        link.publish("shoal/test/a", bytes(4900))
        with pytest.raises(
            TransportError,
            match=r"shoal/test/b.* packets of 5,000 bytes.*this one has 6,0.*chunk_bytes",
        ):
            link.publish("shoal/test/b", bytes(6000))


def test_a_message_that_the_broker_refuses_is_told_once(tmp_path, caplog):
    """It acknowledges it, with a reason; nothing else would say that it went nowhere."""
    (tmp_path / "acl").write_text("topic read #\n")
    with (
        mosquitto_broker(tmp_path, more=f"acl_file {tmp_path / 'acl'}") as broker,
        linked(broker.url, "a") as (link, _),
        caplog.at_level("ERROR", "fleet_protocol.link"),
    ):
        for _ in range(2):
            link.publish("shoal/test/a", bytes(600))
        link.drain(time.monotonic() + WAIT)
    (record,) = caplog.records
    assert re.search(
        r"refuses a message of 620 bytes on shoal/test/a \(Not authorized\); check the login",
        record.message,
    )
