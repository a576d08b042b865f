"""Connects a command to a fleet's server: over the socket in its store, or over the broker.

The socket is used if the server is up on this computer. Either way, the command receives a queue of
the server's later events, in the form of messages over MQTT.
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
from broker_server.settings.broker import BrokerConfig
from broker_server.settings.fleet import FleetConfig
from fleet_protocol.errors import BrokerRefusedError, TransportError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.identity.member import Member
from fleet_protocol.locks import held
from fleet_protocol.refusals import NOTHING_ANSWERS, explain
from fleet_protocol.topics import Topics
from fleet_protocol.transport import (
    BrokerAddress,
    Disconnected,
    Event,
    Received,
    Refused,
    Transport,
    open_transport,
)

# a broker that the server starts must be up soon, since the server answers over it
HOSTED_SECONDS = 5.0
ANSWER_SECONDS = 60.0  # a server answers after it has merged or evaluated
_LOCAL_SECONDS = 10.0  # for a server on this computer to accept a connection, and a request
_AGAIN_SECONDS = 0.5  # between attempts to reach the next server after one has stopped
_READ_BYTES = 64 * 1024

Inbox = queue.SimpleQueue[Event]


@dataclass(frozen=True)
class ServerAccess:
    """The two ways to reach a fleet's server: through its store, or over its broker."""

    fleet: str
    store: Path
    broker: BrokerConfig


Place = ServerAccess | FleetConfig
"""A configuration holds the same fields."""


class LocalVisit:
    """A connection to a store's server; when the server stops, it reconnects to the next one.

    Args:
        connection: the connection from `reach_server`.
        home: the server's place.
        inbox: receives the server's events.
    """

    def __init__(self, connection: socket.socket, home: Place, inbox: Inbox) -> None:
        self._connection = connection
        self._home = home
        self._inbox = inbox
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="shoal-visit", daemon=True)

    def ask(self, request: FrozenModel) -> None:
        """Send a request, and listen from then on.

        Raises:
            TransportError: the server has stopped.
        """
        try:
            self._connection.sendall(request.to_bytes() + b"\n")
        except OSError as error:
            raise TransportError(
                f"the server of {self._home.store} does not accept the request: {error}"
            ) from error
        self._thread.start()

    def close(self) -> None:
        """Close the connection."""
        self._over.set()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _work(self) -> None:
        while not self._over.is_set():
            self._listen()
            self._connection.close()
            self._inbox.put(Disconnected("the server has stopped"))
            # The next server of the store resumes the run that this command follows.
            while not self._over.wait(_AGAIN_SECONDS) and not self._reach_next():
                pass

    def _reach_next(self) -> bool:
        """Listen to the next server of the store, if it is up."""
        try:
            connection = reach_server(self._home.store, _LOCAL_SECONDS)
        except TransportError:  # it is busy
            return False
        if connection is None:
            return False
        with contextlib.suppress(OSError):
            connection.sendall(b"\n")  # only listens
        self._connection = connection
        # `close` was called meanwhile, and has closed the connection before this one.
        if self._over.is_set():
            connection.close()
        return True

    def _listen(self) -> None:
        """Put every line into the inbox until the server stops."""
        incomplete = b""
        with contextlib.suppress(OSError):
            self._connection.settimeout(None)
            while data := self._connection.recv(_READ_BYTES):
                *lines, incomplete = (incomplete + data).split(b"\n")
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
    """Send a request to the server of a store, and yield its later events.

    Raise a TransportError if it stops.
    """
    inbox: Inbox = queue.SimpleQueue()
    visit = LocalVisit(connection, home, inbox)
    with contextlib.closing(visit):
        visit.ask(request)
        yield inbox


@contextlib.contextmanager
def visiting(
    address: BrokerAddress, fleet: str, timeout_seconds: float, member: Member | None
) -> Iterator[tuple[Transport, Inbox]]:
    """Yield a connection to a broker during the block, and the queue of its events."""
    inbox: Inbox = queue.SimpleQueue()
    client = f"shoal-{fleet}-cli-{secrets.token_hex(4)}"
    link = open_transport(address, client, inbox, session_expiry_seconds=0, member=member)
    link.connect(timeout_seconds)
    with contextlib.closing(link):
        yield link, inbox


def require_taken(event: Event) -> None:
    """Raise a BrokerRefusedError if an event says that the broker refuses a request."""
    if isinstance(event, Refused):
        raise BrokerRefusedError(event.code, f"the broker refuses {event} {explain(event.code)}")


@contextlib.contextmanager
def by_broker(home: Place, request: FrozenModel) -> Iterator[Inbox]:
    """Send a request to a fleet's server over its broker, and yield its later events.

    In an enrolled fleet only one command sends at a time: the server ignores senders that are older
    than the newest.
    """
    fleet = home.fleet
    broker = home.broker
    topics = Topics(home.fleet)
    member = member_of(broker, fleet)
    timeout = broker.connect_timeout_seconds
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as sending:
        if member is not None:
            member.folder.mkdir(parents=True, exist_ok=True)
            busy = (
                f"another command is using the server of fleet {fleet}; end it, or wait "
                "until it has finished"
            )
            lock = held(
                member.folder / "asking", busy, seconds=ANSWER_SECONDS, error=TransportError
            )
            sending.enter_context(lock)
        wait = min(timeout, HOSTED_SECONDS) if broker.hosted else timeout
        link, inbox = stack.enter_context(visiting(broker_address(broker), fleet, wait, member))
        # Before the request, whose answer may arrive immediately.
        link.subscribe(topics.server_events)
        link.subscribe(topics.server_status)
        link.publish(topics.server_control, request.to_bytes())
        # The request is sent before another command may send.
        link.drain(time.monotonic() + timeout)
        sending.close()
        yield inbox


@contextlib.contextmanager
def asked(home: Place, here: FrozenModel, elsewhere: FrozenModel | None) -> Iterator[Inbox]:
    """Send a request to a fleet's server, and yield its later events.

    It uses the socket if the server is on this computer, otherwise the broker.

    Args:
        home: the server's place.
        here: the request for the socket.
        elsewhere: the request for the broker; None for a request that only the socket accepts.

    Raises:
        TransportError: there is no broker, or no server on this computer, or the server is busy.
        ConfigError: the server belongs to another user.
    """
    connection = reach_server(home.store, _LOCAL_SECONDS)
    with contextlib.ExitStack() as stack:
        if connection is not None:
            yield stack.enter_context(by_socket(home, connection, here))
        elif elsewhere is not None:
            try:
                inbox = stack.enter_context(by_broker(home, elsewhere))
            except TransportError as error:
                # A broker that the server starts is up only while a server is.
                if not (home.broker.hosted and NOTHING_ANSWERS in str(error)):
                    raise
                raise TransportError(
                    f"no server of fleet {home.fleet} is running on this computer: neither on the"
                    f" store {home.store} nor at {broker_address(home.broker)}; start one with"
                    " `shoal up` or `shoal run`"
                ) from error
            yield inbox
        else:
            raise TransportError(
                f"no server is running on the store {home.store}; start it with `shoal up`"
            )


def is_here(home: Place) -> bool:
    """Return whether a store's server is running on this computer; errors as in `reach_server`."""
    connection = reach_server(home.store, _LOCAL_SECONDS)
    if connection is not None:
        connection.close()
    return connection is not None
