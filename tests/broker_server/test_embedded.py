"""The embedded broker of a fleet with identities among strangers: who says nothing, and who makes
it panic.
"""

import contextlib
import queue
import socket
import time

import pytest

from broker_server.service.authority import NewFleet, enroll, found_fleet
from broker_server.service.membership import hosted_broker
from broker_server.settings.fleet import BrokerConfig
from fleet_protocol.errors import TransportError
from fleet_protocol.identity.enrolment import read_enrolment
from fleet_protocol.link import Link
from tests.brokers import free_port


@pytest.fixture
def gated(tmp_path):
    """An embedded broker of a fleet with identities, and how to open a connection of its one
    device.
    """
    folder = tmp_path / "lab"
    port = free_port()
    found_fleet(folder, NewFleet("lab", "127.0.0.1", port))
    enrolment = read_enrolment(enroll(folder, "pi-1"))
    config = BrokerConfig(identity=folder / "server.enrolment", port=port, listen="127.0.0.1")
    with (
        hosted_broker(config, "lab", tmp_path / "broker") as broker,
        contextlib.ExitStack() as stack,
    ):

        def opened(name):
            link = Link(
                enrolment.address(tmp_path / name.replace("+", "")), name, queue.SimpleQueue()
            )
            stack.callback(link.close)
            link.connect(10)
            return link

        yield broker, opened


def test_a_stranger_who_connects_and_says_nothing_keeps_nobody_out(gated):
    """Whether it says nothing, or begins to shake hands and then says nothing more."""
    broker, opened = gated
    with contextlib.ExitStack() as stack:
        for begun in (b"", b"\x16\x03\x01"):
            stack.enter_context(socket.create_connection(("127.0.0.1", broker.port))).sendall(begun)
            opened(f"board-{len(begun)}")


def test_a_broker_that_lets_nobody_in_any_more_is_started_again(gated, tmp_path, monkeypatch):
    """A client whose name it does not like makes it panic under a lock; its log does not grow
    without end.
    """
    broker, opened = gated
    first = broker.pid
    with contextlib.suppress(TransportError):
        opened("a+b")
    deadline = time.monotonic() + 60
    while broker.pid in {first, None}:
        assert time.monotonic() < deadline
        with contextlib.suppress(TransportError), contextlib.ExitStack():
            opened("board")
    opened("later")
    log = tmp_path / "broker" / "broker.log"
    monkeypatch.setattr("broker_server.service.broker._MOST_LOG_BYTES", 1000)
    with log.open("ab") as file:
        file.write(bytes(2000))
    while log.stat().st_size > 1000:
        assert time.monotonic() < deadline
    opened("last")
