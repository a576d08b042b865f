"""Many MQTT clients in one thread: one selector drives paho's own packets for all of them."""

import contextlib
import selectors
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from fleet_protocol.lean_client import LeanClient
from fleet_protocol.link import KEEP_ALIVE_SECONDS
from fleet_protocol.topics import Topics
from fleet_protocol.transport import BrokerAddress, Farewell

TICK_SECONDS = 0.5
# QoS 1 messages of a client that the broker has not acknowledged.
_IN_FLIGHT = 32
# A connection that is lost for a shorter time keeps its subscriptions and queued messages.
_SESSION_EXPIRY_SECONDS = 60


class Behaviour(Protocol):
    """The behaviour of one client."""

    def on_connected(self) -> None:
        """Subscribe, now that the broker has accepted the connection."""

    def on_message(self, topic: str, payload: bytes) -> None:
        """Handle a message."""

    def on_tick(self, now: float) -> None:
        """Repeat messages that were not answered; called regularly with ``time.monotonic()``."""


class SwarmClient:
    """One client of a swarm, which counts the bytes that it exchanges by kind.

    Attributes:
        topics: topics of the fleet.
        name: name of the device.
        behaviour: its behaviour; set before it connects.
        bytes_by_kind: bytes of topics and payloads by kind of topic and direction.
        away_until: ``time.monotonic()`` before which it does not connect again.
        watched: the socket that its swarm waits for, if any.
        client: the paho client.
    """

    def __init__(
        self,
        topics: Topics,
        name: str,
        will: Farewell | None = None,
        client: type[paho.Client] = paho.Client,
    ) -> None:
        self.topics = topics
        self.name = name
        self.behaviour: Behaviour | None = None
        self.bytes_by_kind: dict[str, int] = {}
        self.away_until = 0.0
        self.watched: Any = None
        self.client = client(
            CallbackAPIVersion.VERSION2,
            client_id=f"shoal-{topics.fleet}-{name}",
            protocol=paho.MQTTv5,
        )
        if will is not None:
            self.client.will_set(will.topic, will.payload, qos=1, retain=True)
        self.client.max_inflight_messages_set(_IN_FLIGHT)
        self.client.on_message = self._on_message
        # The lean client passes payloads on without creating a paho message.
        if isinstance(self.client, LeanClient):
            self.client.on_plain_message = self._receive
        self.client.on_connect = self._on_connect

    def connect(self, address: BrokerAddress) -> None:
        """Open the connection; the swarm's loop exchanges the packets."""
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.SessionExpiryInterval = _SESSION_EXPIRY_SECONDS
        self.client.connect(
            address.host,
            address.port,
            keepalive=KEEP_ALIVE_SECONDS,
            clean_start=True,  # the session of an earlier benchmark would deliver its chunks
            properties=properties,
        )

    def publish(
        self,
        topic: str,
        payload: bytes | bytearray,
        *,
        retain: bool = False,
    ) -> None:
        """Send with quality of service 1."""
        self._count("sent", topic, len(topic) + len(payload))
        self.client.publish(topic, payload, qos=1, retain=retain)

    def subscribe(self, topic_filter: str) -> None:
        """Subscribe to a topic."""
        self.client.subscribe(topic_filter, qos=1)

    def unsubscribe(self, topic_filter: str) -> None:
        """Unsubscribe from a topic."""
        self.client.unsubscribe(topic_filter)

    def _on_connect(self, *_: Any) -> None:
        if self.behaviour is not None:
            self.behaviour.on_connected()

    def _on_message(
        self,
        _client: Any,
        _userdata: Any,
        message: paho.MQTTMessage,
    ) -> None:
        self._receive(message.topic, bytes(message.payload), bool(message.retain))

    def _receive(
        self,
        topic: str,
        payload: bytes,
        _retained: bool,
    ) -> None:
        self._count("received", topic, len(topic) + len(payload))
        if self.behaviour is not None:
            self.behaviour.on_message(topic, payload)

    def _count(self, way: str, topic: str, size: int) -> None:
        # Topics start with the fleet's root and a slash.
        levels = topic[len(self.topics.root) + 1 :].split("/")
        # The last level is the kind if the first level names a device or the server.
        kind = levels[-1] if levels[0] in {"devices", "server"} else levels[0]
        key = f"{kind} {way}"
        self.bytes_by_kind[key] = self.bytes_by_kind.get(key, 0) + size


class Swarm:
    """Drives the clients of one process."""

    def __init__(self, clients: Iterable[SwarmClient], address: BrokerAddress) -> None:
        self._clients = tuple(clients)
        self._address = address
        self._selector = selectors.DefaultSelector()

    def run(self, stop: Callable[[], bool]) -> None:
        """Run until ``stop`` returns true; it is called every half second."""
        for client in self._clients:
            self._connect(client, 0.0)
        next_tick = time.monotonic()
        while not stop():
            self._exchange(max(0.0, next_tick - time.monotonic()))
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_SECONDS
                self._tick(time.monotonic())
        for client in self._clients:
            client.client.disconnect()

    def _exchange(self, wait_seconds: float) -> None:
        """Read from and write to the sockets that are ready."""
        for key, events in self._selector.select(wait_seconds):
            client: SwarmClient = key.data
            if events & selectors.EVENT_READ:
                client.client.loop_read()
            if events & selectors.EVENT_WRITE:
                client.client.loop_write()
            # Reading may queue a packet, or close the connection.
            self._watch(client)

    def _watch(self, client: SwarmClient) -> None:
        """Watch a client's connection for the events that it waits for, if it has one."""
        # Paho opens a new socket when it connects again, and drops the socket of a lost connection.
        socket = client.client.socket()
        if socket is not client.watched:
            if client.watched is not None:
                self._selector.unregister(client.watched)
            if socket is not None:
                self._selector.register(socket, selectors.EVENT_READ, client)
            client.watched = socket
        if socket is None:
            return
        events = selectors.EVENT_READ
        if client.client.want_write():
            events |= selectors.EVENT_WRITE
        # With thousands of clients, a system call for each change is noticeable.
        if events != self._selector.get_key(socket).events:
            self._selector.modify(socket, events, client)

    def _connect(self, client: SwarmClient, now: float) -> None:
        """Connect a client that is disconnected, unless it has to stay away.

        If the broker is unreachable, the next call tries again.
        """
        if client.client.socket() is None and now >= client.away_until:
            with contextlib.suppress(OSError):
                client.connect(self._address)
        self._watch(client)

    def _tick(self, now: float) -> None:
        """Let paho keep connections alive, and let clients repeat unanswered messages."""
        for client in self._clients:
            # Keep-alive packets, which the selector's events do not cause.
            client.client.loop_misc()
            self._connect(client, now)
            if client.behaviour is not None and client.client.is_connected():
                client.behaviour.on_tick(now)
                # The behaviour may have queued packets.
                self._watch(client)
