"""Many MQTT clients in one thread: paho's own packets, driven by one selector instead of a thread
for each client.
"""

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
_IN_FLIGHT = 32


class Behaviour(Protocol):
    """What one client does."""

    def on_connected(self) -> None:
        """The broker accepted the connection; subscriptions are made here."""

    def on_message(self, topic: str, payload: bytes) -> None:
        """A message came."""

    def on_tick(self, now: float) -> None:
        """Now and then, at ``time.monotonic()``: repeat what was not answered."""


class Member:
    """One client of a swarm, which counts the payload bytes of what it exchanges by kind.

    It does not connect again before `away_until`, of ``time.monotonic()``; its swarm waits for the
    socket `watched`.
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
        self.client.on_message = lambda _, __, said: self._take(
            said.topic, bytes(said.payload), bool(said.retain)
        )
        if isinstance(self.client, LeanClient):
            self.client.on_plain_message = self._take
        self.client.on_connect = self._on_connect

    def _count(self, way: str, topic: str, size: int) -> None:
        kind = topic[len(self.topics.root) + 1 :].split("/")
        key = f"{kind[-1] if kind[0] in {'devices', 'server'} else kind[0]} {way}"
        self.bytes_by_kind[key] = self.bytes_by_kind.get(key, 0) + size

    def _take(self, topic: str, payload: bytes, _retained: bool) -> None:
        self._count("received", topic, len(topic) + len(payload))
        if self.behaviour is not None:
            self.behaviour.on_message(topic, payload)

    def _on_connect(self, *_: Any) -> None:
        if self.behaviour is not None:
            self.behaviour.on_connected()

    def connect(self, address: BrokerAddress) -> None:
        """Open the connection; the packets go with the swarm's loop."""
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.SessionExpiryInterval = 60
        self.client.connect(
            address.host,
            address.port,
            keepalive=KEEP_ALIVE_SECONDS,
            clean_start=True,
            properties=properties,
        )

    def publish(self, topic: str, payload: bytes | bytearray, *, retain: bool = False) -> None:
        """Send with quality of service 1."""
        self._count("sent", topic, len(topic) + len(payload))
        self.client.publish(topic, payload, qos=1, retain=retain)

    def subscribe(self, topic_filter: str) -> None:
        """Let messages come."""
        self.client.subscribe(topic_filter, qos=1)

    def unsubscribe(self, topic_filter: str) -> None:
        """Let them come no more."""
        self.client.unsubscribe(topic_filter)


class Swarm:
    """Drives the clients of one process."""

    def __init__(self, members: Iterable[Member], address: BrokerAddress) -> None:
        self._members = tuple(members)
        self._address = address
        self._selector = selectors.DefaultSelector()

    def run(self, stop: Callable[[], bool]) -> None:
        """Work until ``stop`` says so, which is asked every half second."""
        for member in self._members:
            self._connect(member, 0.0)
        tick = time.monotonic()
        while not stop():
            self._turn(max(0.0, tick - time.monotonic()))
            if time.monotonic() >= tick:
                tick = time.monotonic() + TICK_SECONDS
                self._tick(time.monotonic())
        for member in self._members:
            member.client.disconnect()

    def _turn(self, wait: float) -> None:
        for key, events in self._selector.select(wait):
            member: Member = key.data
            if events & selectors.EVENT_READ:
                member.client.loop_read()
            if events & selectors.EVENT_WRITE:
                member.client.loop_write()
            self._follow(member)

    def _follow(self, member: Member) -> None:
        """Wait for what a client's connection waits for now, if it has one."""
        socket = member.client.socket()
        if socket is not member.watched:
            if member.watched is not None:
                self._selector.unregister(member.watched)
            if socket is not None:
                self._selector.register(socket, selectors.EVENT_READ, member)
            member.watched = socket
        if socket is None:
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if member.client.want_write() else 0)
        if wanted != self._selector.get_key(socket).events:
            self._selector.modify(socket, wanted, member)

    def _connect(self, member: Member, now: float) -> None:
        """Connect a client that is not, and is not to stay away.

        The broker may be gone, and is tried again.
        """
        if member.client.socket() is None and now >= member.away_until:
            with contextlib.suppress(OSError):
                member.connect(self._address)
        self._follow(member)

    def _tick(self, now: float) -> None:
        for member in self._members:
            member.client.loop_misc()
            self._connect(member, now)
            if member.behaviour is not None and member.client.is_connected():
                member.behaviour.on_tick(now)
                self._follow(member)
