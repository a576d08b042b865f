"""How a command reaches a fleet's server: the socket in its store, if it is up on this computer, or else the broker.

Whoever asks gets a queue of what the server says from then on, in the form of messages over MQTT, whichever way it is.
"""

import contextlib
import json
import queue
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from broker_server.service.local import reach_server
from broker_server.service.membership import broker_address, member_of
from broker_server.settings.fleet import BrokerConfig, FleetConfig
from fleet_protocol.errors import TransportError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.identity.member import Member
from fleet_protocol.locks import held
from fleet_protocol.topics import Topics
from fleet_protocol.transport import BrokerAddress, Disconnected, Event, Received, Transport, open_transport

HOSTED_SECONDS = 5.0  # a broker that the server starts is up with it, or nobody would answer
ANSWER_SECONDS = 60.0  # a server that is merging or judging answers afterwards
_LOCAL_SECONDS = 10.0  # a server on this computer takes a connection, and a request
_AGAIN_SECONDS = 0.5  # between attempts to reach the next server after one that has gone
_READ_BYTES = 64 * 1024

Inbox = queue.SimpleQueue[Event]


@dataclass(frozen=True)
class Home:
    """Where the server of a fleet is asked: at its store, or over its broker."""

    fleet: str
    store: Path
    broker: BrokerConfig


Place = Home | FleetConfig
"""A configuration says the same."""


class LocalVisit:
    """A connection to the server of a store; after it has gone, one to the next that comes there.

    Args:
        connection: of `reach_server`.
        home: where.
        inbox: gets what the server says.
    """

    def __init__(self, connection: socket.socket, home: Place, inbox: Inbox) -> None:
        self._connection = connection
        self._home = home
        self._inbox = inbox
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="shoal-visit", daemon=True)

    def ask(self, request: FrozenModel) -> None:
        """Ask something, and listen from then on.

        Raises:
            TransportError: the server has gone.
        """
        try:
            self._connection.sendall(request.to_bytes() + b"\n")
        except OSError as error:
            raise TransportError(f"the server of {self._home.store} takes no request: {error}") from error
        self._thread.start()

    def close(self) -> None:
        """Hang up."""
        self._over.set()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _work(self) -> None:
        while not self._over.is_set():
            self._listen()
            self._connection.close()
            self._inbox.put(Disconnected("the server has gone"))
            while not self._over.wait(_AGAIN_SECONDS) and not self._reach_next():
                pass

    def _reach_next(self) -> bool:
        """Listen to the next server of the store, if it is there."""
        try:
            connection = reach_server(self._home.store, _LOCAL_SECONDS)
        except TransportError:  # it is busy
            return False
        if connection is None:
            return False
        with contextlib.suppress(OSError):
            connection.sendall(b"\n")  # listens, and asks nothing
        self._connection = connection
        if self._over.is_set():
            connection.close()
        return True

    def _listen(self) -> None:
        """Put every line into the inbox until the server has gone."""
        rest = b""
        with contextlib.suppress(OSError):
            self._connection.settimeout(None)
            while data := self._connection.recv(_READ_BYTES):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._inbox.put(Received(self._topic(line), line))

    def _topic(self, line: bytes) -> str:
        topics = Topics(self._home.fleet)
        with contextlib.suppress(ValueError, AttributeError):
            if json.loads(line).get("type") == "server":
                return topics.server_status
        return topics.server_events


@contextlib.contextmanager
def by_socket(home: Place, connection: socket.socket, request: FrozenModel) -> Iterator[Inbox]:
    """Ask the server of a store something, and hear what it tells from then on; a TransportError where it goes."""
    inbox: Inbox = queue.SimpleQueue()
    visit = LocalVisit(connection, home, inbox)
    with contextlib.closing(visit):
        visit.ask(request)
        yield inbox


@contextlib.contextmanager
def visiting(
    address: BrokerAddress, fleet: str, timeout_seconds: float, member: Member | None
) -> Iterator[tuple[Transport, Inbox]]:
    """A connection to a broker for as long as the block lasts."""
    inbox: Inbox = queue.SimpleQueue()
    client = f"shoal-{fleet}-cli-{secrets.token_hex(4)}"
    link = open_transport(address, client, inbox, session_expiry_seconds=0, member=member)
    link.connect(timeout_seconds)
    with contextlib.closing(link):
        yield link, inbox


@contextlib.contextmanager
def by_broker(home: Place, request: FrozenModel) -> Iterator[Inbox]:
    """Ask the server of a fleet something over its broker, and hear what it tells from then on.

    Of an enrolled fleet one asks at a time: the server takes nothing of who came before somebody it has heard.
    """
    fleet, broker, topics = home.fleet, home.broker, Topics(home.fleet)
    member, timeout = member_of(broker, fleet), broker.connect_timeout_seconds
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as turn:
        if member is not None:
            member.folder.mkdir(parents=True, exist_ok=True)
            busy = f"another command asks the server of fleet {fleet} all the time; end it, or wait until it is done"
            turn.enter_context(held(member.folder / "asking", busy, seconds=ANSWER_SECONDS, error=TransportError))
        wait = min(timeout, HOSTED_SECONDS) if broker.hosted else timeout
        link, inbox = stack.enter_context(visiting(broker_address(broker), fleet, wait, member))
        link.subscribe(topics.server_events)
        link.subscribe(topics.server_status)
        link.publish(topics.server_control, request.to_bytes())
        link.drain(time.monotonic() + timeout)
        turn.close()
        yield inbox


@contextlib.contextmanager
def asked(home: Place, here: FrozenModel, elsewhere: FrozenModel | None) -> Iterator[Inbox]:
    """Ask the server of a fleet: at its socket if it is on this computer, or else over the broker.

    Args:
        home: where.
        here: what is asked at the socket.
        elsewhere: what is asked over the broker; None for what is asked at the socket alone.

    Raises:
        TransportError: there is no broker, or no server on this computer, or that one is busy.
        ConfigError: the server is another user's.
    """
    connection = reach_server(home.store, _LOCAL_SECONDS)
    with contextlib.ExitStack() as stack:
        if connection is not None:
            yield stack.enter_context(by_socket(home, connection, here))
        elif elsewhere is not None:
            yield stack.enter_context(by_broker(home, elsewhere))
        else:
            raise TransportError(f"no server works on the store {home.store}; start it with `shoal up`")


def is_here(home: Place) -> bool:
    """Whether the server that works on a store is up on this computer; errors as of `reach_server`."""
    connection = reach_server(home.store, _LOCAL_SECONDS)
    if connection is not None:
        connection.close()
    return connection is not None
