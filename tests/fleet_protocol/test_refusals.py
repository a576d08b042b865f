"""What a broker refuses is explained and not sent again; being refused costs little."""

import contextlib
import logging
import queue
import random
import re
import socket
import threading
import time

import pytest

from fleet_protocol.backoff import Backoff
from fleet_protocol.errors import BrokerRefusedError, TransportError
from fleet_protocol.folded_lines import FoldedLines
from fleet_protocol.lean_client import _PAHO_REASONS
from fleet_protocol.link import Link
from fleet_protocol.refusals import REFUSALS, Reaction, explain, refusal_of_code
from fleet_protocol.transport import BrokerAddress, Connected, Disconnected, LoginRefused, Refused
from tests.brokers import free_port, mosquitto_broker
from tests.fleet_protocol.test_link import WAIT, linked, next_of
from tests.refusing_brokers import FORTY_KB, dynamic_security, quota_broker, scripted_broker


def test_every_reason_of_paho_has_a_row():
    """Only reasons that answer what Shoal never sends have none."""
    foreign = {
        0x91,  # a packet id in use: paho chooses them
        0x92,
        0x94,  # topic aliases
        0x9E,  # shared subscriptions
        0xA1,  # subscription identifiers
    }
    failures = {code for code in _PAHO_REASONS if code >= 0x80}
    assert failures - set(REFUSALS) == foreign
    assert all(refusal.remedy and refusal.meaning for refusal in REFUSALS.values())


def test_a_reason_that_nobody_knows_is_named_by_its_number():
    """A broker may have reasons of its own."""
    assert explain(0xEE).startswith("(reason 0xee); check the broker's log")
    assert refusal_of_code(0xEE).connection is Reaction.BACK_OFF


def test_a_packet_that_is_refused_in_its_acknowledgement_is_not_sent_again(tmp_path, caplog):
    """Mosquitto gives reason 0x95, which paho does not know in a PUBACK: it ended the connection,
    and sent the packet again with the next one.
    """
    with (
        mosquitto_broker(tmp_path, more="message_size_limit 40000") as broker,
        linked(broker.url, "a") as (link, inbox),
    ):
        link.publish("shoal/t/0", bytes(50_000))
        link.publish("shoal/t/1", bytes(30_000))
        link.drain(time.monotonic() + WAIT)
        refused = next_of(inbox, Refused)
        assert (refused.topic, refused.code) == ("shoal/t/0", 0x95)
        assert link.packet_bytes == refused.packet_bytes - 1
        with pytest.raises(BrokerRefusedError, match=r"Packet too large.*message_size_limit"):
            link.publish("shoal/t/2", bytes(50_000))
        link.publish("shoal/t/3", bytes(49_000))
        link.drain(time.monotonic() + WAIT)
        # Each is refused once, also where Mosquitto ends the connection after its answer.
        assert next_of(inbox, Refused).topic == "shoal/t/3"
        link.publish("shoal/t/4", bytes(1000))
        link.drain(time.monotonic() + WAIT)
        events = []
        while not inbox.empty():
            events.append(inbox.get())
        assert not [event for event in events if isinstance(event, Refused)]
    assert len([record for record in caplog.records if "refuses" in record.message]) == 1


@pytest.mark.parametrize("answer", [b"\xe0\2\x95\0", b""], ids=["reason", "silent"])
def test_a_packet_for_which_connections_are_ended_is_not_sent_again(tmp_path, answer):
    """A hosted broker ends the connection; some give no reason, and end the next ones, too."""
    with (
        mosquitto_broker(tmp_path) as broker,
        quota_broker(broker.port, FORTY_KB, answer) as front,
        linked(front.url, "a") as (link, inbox),
    ):
        link.publish("shoal/t/0", bytes(1000))
        link.publish("shoal/t/1", bytes(50_000))
        refused = next_of(inbox, Refused)
        assert (refused.topic, refused.code) == ("shoal/t/1", 0x95)
        link.publish("shoal/t/2", bytes(30_000))
        link.drain(time.monotonic() + WAIT)
        assert front.ended <= 3  # one that gives its reason may close before that is read


def test_a_subscription_that_is_refused_is_an_error_and_later_an_event(tmp_path):
    """Mosquitto answered with a reason that nobody read."""
    with dynamic_security(tmp_path, rights=["subscribe shoal/open"]) as broker:
        inbox = queue.SimpleQueue()
        link = Link(BrokerAddress.parse(broker.login("board")), "a", inbox)
        link.connect(WAIT)
        with contextlib.closing(link):
            link.subscribe("shoal/open")
            with pytest.raises(
                BrokerRefusedError, match=r"to shoal/closed \(Not authorized\)"
            ) as no:
                link.subscribe("shoal/closed")
            assert no.value.code == 0x87
            next_of(inbox, Connected)
            broker.stop()
            next_of(inbox, Disconnected)
            broker.start()
            assert next_of(inbox, Refused) == Refused("shoal/closed", 0x87)


@pytest.mark.parametrize("code", [0x84, 0x85, 0x86, 0x87, 0x8A, 0x9A, 0x9B, 0x9C, 0x9D])
def test_a_refused_login_is_an_error_at_once(code):
    """It was tried for 30 s, and ended in "Is it running?"."""
    with scripted_broker({0x10: bytes((0x20, 3, 0, code, 0))}) as url:
        link = Link(BrokerAddress.parse(url), "a", queue.SimpleQueue())
        began = time.monotonic()
        with pytest.raises(BrokerRefusedError, match=re.escape(explain(code))) as refused:
            link.connect(30.0)
    assert time.monotonic() - began < 5
    assert "Is it running" not in str(refused.value)


@pytest.mark.parametrize("old", [1, 4, 5])
def test_a_broker_of_an_older_protocol_is_named(old):
    """It answers with a code of MQTT 3.1.1."""
    with scripted_broker({0x10: bytes((0x20, 2, 0, old))}) as url:
        link = Link(BrokerAddress.parse(url), "a", queue.SimpleQueue())
        with pytest.raises(
            BrokerRefusedError, match="MQTT 5" if old == 1 else "the login|password"
        ):
            link.connect(10.0)


def test_a_busy_broker_is_asked_again():
    """Time mends it, so the first connection waits for it."""
    with scripted_broker({0x10: b"\x20\3\0\x89\0"}) as url:
        link = Link(BrokerAddress.parse(url), "a", queue.SimpleQueue())
        with pytest.raises(TransportError, match=r"within 1 s.*Server busy") as refused:
            link.connect(1.0)
    assert not isinstance(refused.value, BrokerRefusedError)


@pytest.mark.parametrize("code", [0x8E, 0x95, 0x96, 0xEE])
def test_every_reason_of_a_disconnect_arrives(code):
    """Also one that paho does not know, which ended its thread's turn with an error."""
    answers = {0x10: b"\x20\3\0\0\0", 0x82: bytes((0xE0, 2, code, 0))}
    with scripted_broker(answers) as url:
        inbox = queue.SimpleQueue()
        link = Link(BrokerAddress.parse(url), "a", inbox)
        link.connect(10.0)
        with contextlib.closing(link):
            link.subscribe("t", timeout_seconds=0)
            lost = next_of(inbox, Disconnected)
    refusal = refusal_of_code(code)
    assert (lost.code, lost.reason) == (code, f"{refusal.meaning}; {refusal.remedy}")


def test_a_login_that_is_refused_later_is_an_event():
    """A board of a revoked enrolment learns it so, where the broker checks logins."""
    accepted = threading.Event()

    def answer():
        if accepted.is_set():
            return b"\x20\3\0\x87\0"
        accepted.set()
        return b"\x20\3\0\0\0"

    with scripted_broker({0x10: answer, 0x82: None}) as url:
        inbox = queue.SimpleQueue()
        link = Link(BrokerAddress.parse(url), "a", inbox)
        link.connect(10.0)
        with contextlib.closing(link):
            link.subscribe("t", timeout_seconds=0)
            assert next_of(inbox, LoginRefused) == LoginRefused(0x87)


HOUR = 3600.0


def attempts(wait, seconds, lasts=0.0):
    """How often a client connects in a time on a simulated clock; each connection lasts a while."""
    count = 0
    now = 0.0
    while now < seconds:
        count += 1
        now += lasts
        now += wait(now)
    return count


@pytest.mark.parametrize("seed", range(20))
def test_a_client_that_is_refused_asks_seldom(seed):
    """An hour on a simulated clock: growth first, then about once an hour."""
    drawn = random.Random(seed).uniform
    refused = Backoff(drawn)
    assert attempts(lambda _now: refused.wait_refused(), HOUR) <= 7
    assert attempts(lambda _now: refused.wait_refused(), 24 * HOUR) <= 48

    broken = Backoff(drawn)

    def lose(now):
        broken.note_connection(now - 1.0)
        return broken.wait_lost(now)

    assert attempts(lose, HOUR, lasts=1.0) <= 11
    assert attempts(lose, 24 * HOUR, lasts=1.0) <= 48


def test_packets_that_are_dropped_one_after_another_are_forgiven_a_few_times():
    """A board that sent its status anew with each connection asked as if nothing had happened."""
    backoff = Backoff(lambda _least, most: most)
    waits = []
    for second in range(8):
        backoff.note_connection(float(second))
        backoff.forgive()
        waits.append(backoff.wait_lost(second + 0.1))
    assert waits == [0.5, 0.5, 0.5, 0.5, 1.0, 2.0, 4.0, 8.0]
    backoff.note_connection(100.0)
    assert backoff.wait_lost(200.0) == 0.5  # it has lasted
    backoff.forgive()
    assert backoff.wait_lost(200.0) == 0.5


def test_a_connection_that_has_lasted_makes_the_next_one_quick():
    """A board in a good network is back within a second."""
    backoff = Backoff(lambda _least, most: most)
    for second in range(8):
        backoff.note_connection(float(second))
        backoff.wait_lost(second + 0.5)
    backoff.note_connection(100.0)
    assert backoff.wait_lost(101.0) == 1024.0
    backoff.note_connection(2000.0)
    assert backoff.wait_lost(2100.0) == 0.5


def test_a_broker_that_does_not_answer_is_asked_twice_a_minute():
    """That costs it nothing, and it is found again soon."""
    backoff = Backoff(lambda _least, most: most)
    waits = [backoff.wait_unreached() for _ in range(2000)]
    assert waits[:3] == [0.5, 1.0, 2.0]
    assert max(waits) == 30.0


def test_lines_that_repeat_themselves_are_folded():
    """A condition that lasts an hour costs four lines, however often it is noted."""
    now = [0.0]
    lines = []
    folded = FoldedLines(lambda level, line: lines.append((level, line)), lambda: now[0])
    for second in range(3600):
        now[0] = float(second)
        folded.warning("lost", "connection lost")
        if second % 600 == 0:
            folded.error("other", "another")
    lost = [line for level, line in lines if level == logging.WARNING]
    assert lost[0] == "connection lost"
    assert lost[1] == "connection lost (299 such lines were left out)"
    assert len(lost) == 3
    assert (logging.ERROR, "another") in lines
    now[0] = 4 * HOUR
    folded.warning("lost", "connection lost")
    assert lines[-1] == (logging.WARNING, "connection lost")


def measured_bytes(tmp_path, more, seconds):
    """Bytes of all packets of a client whose broker is behind a counting front, while it connects."""
    with (
        mosquitto_broker(tmp_path, more=more) as broker,
        quota_broker(broker.port, FORTY_KB, b"") as front,
    ):
        link = Link(BrokerAddress.parse(front.url), "a" * 100, queue.SimpleQueue())
        with contextlib.suppress(TransportError):
            link.connect(seconds)
        link.close()
        return front.bytes, front.connections


def test_a_refused_login_costs_few_bytes(tmp_path):
    """The bytes of one attempt, as often as an hour has attempts, are a tenth of 10 kB."""
    (tmp_path / "words").touch(0o600)
    more = f"\nallow_anonymous false\npassword_file {tmp_path / 'words'}\n"
    count, connections = measured_bytes(tmp_path, more, 5.0)
    assert connections == 1
    assert 7 * count < 10_000


@pytest.mark.parametrize("scheme", ["mqtt", "mqtts"])
def test_a_port_that_is_no_broker_says_so(scheme):
    """Something accepts connections and ends them, as a port for the other scheme does."""
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as listening:
        listening.settimeout(5)

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    listening.accept()[0].close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        link = Link(BrokerAddress.parse(f"{scheme}://127.0.0.1:{port}"), "a", queue.SimpleQueue())
        with pytest.raises(TransportError, match="port is for mqtt:// or for mqtts://"):
            link.connect(1.5)
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(5)
