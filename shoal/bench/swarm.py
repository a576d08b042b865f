"""Many MQTT clients in one thread: paho's own packets, driven by one selector instead of a thread for each client."""

import selectors
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from fleet_protocol.topics import Topics
from fleet_protocol.transport import BrokerAddress, Farewell

TICK_SECONDS = 0.5
KEEP_ALIVE_SECONDS = 60
_IN_FLIGHT = 32


class Behaviour(Protocol):
    """What one client does."""

    def on_connected(self) -> None:
        """The broker accepted the connection; subscriptions are made here."""

    def on_message(self, topic: str, payload: bytes) -> None:
        """A message came."""

    def on_tick(self, now: float) -> None:
        """Now and then: repeat what was not answered.

        Args:
            now: ``time.monotonic()``.
        """


class Member:
    """One client of a swarm, which counts the payload bytes of what it exchanges by kind.

    Args:
        topics: of the fleet.
        name: id of the client.
        will: published by the broker when it vanishes.
    """

    def __init__(self, topics: Topics, name: str, will: Farewell | None = None) -> None:
        self.topics = topics
        self.name = name
        self.behaviour: Behaviour | None = None
        self.bytes_by_kind: dict[str, int] = {}
        self.client = paho.Client(
            CallbackAPIVersion.VERSION2, client_id=f"shoal-{topics.fleet}-{name}", protocol=paho.MQTTv5
        )
        if will is not None:
            self.client.will_set(will.topic, will.payload, qos=1, retain=True)
        self.client.max_inflight_messages_set(_IN_FLIGHT)
        self.client.on_message = self._on_message
        self.client.on_connect = self._on_connect

    def _count(self, way: str, topic: str, size: int) -> None:
        kind = topic[len(self.topics.root) + 1 :].split("/")
        key = f"{kind[-1] if kind[0] in {'devices', 'server'} else kind[0]} {way}"
        self.bytes_by_kind[key] = self.bytes_by_kind.get(key, 0) + size

    def _on_message(self, _client: paho.Client, _data: object, message: paho.MQTTMessage) -> None:
        self._count("received", message.topic, len(message.topic) + len(message.payload))
        if self.behaviour is not None:
            self.behaviour.on_message(message.topic, bytes(message.payload))

    def _on_connect(self, *_: Any) -> None:
        if self.behaviour is not None:
            self.behaviour.on_connected()

    def connect(self, address: BrokerAddress) -> None:
        """Open the connection; the packets go with the swarm's loop."""
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.SessionExpiryInterval = 60
        self.client.connect(
            address.host, address.port, keepalive=KEEP_ALIVE_SECONDS, clean_start=True, properties=properties
        )

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
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
        self._writing: set[int] = set()

    def run(self, stop: Callable[[], bool]) -> None:
        """Work until ``stop`` says so, which is asked every half second."""
        for member in self._members:
            member.connect(self._address)
            self._selector.register(self._socket(member), selectors.EVENT_READ, member)
        tick = time.monotonic()
        while not stop():
            self._turn(max(0.0, tick - time.monotonic()))
            if time.monotonic() >= tick:
                tick = time.monotonic() + TICK_SECONDS
                self._tick(time.monotonic())
        for member in self._members:
            member.client.disconnect()

    @staticmethod
    def _socket(member: Member) -> Any:
        return member.client.socket()

    def _turn(self, wait: float) -> None:
        for key, events in self._selector.select(wait):
            member: Member = key.data
            if events & selectors.EVENT_READ:
                member.client.loop_read()
            if events & selectors.EVENT_WRITE:
                member.client.loop_write()
            if not self._alive(member, key.fileobj):
                continue
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if member.client.want_write() else 0)
            if wanted != key.events:
                self._selector.modify(key.fileobj, wanted, member)

    def _alive(self, member: Member, known: Any) -> bool:
        """Connect a client again whose connection the broker closed."""
        if self._socket(member) is known:
            return True
        self._selector.unregister(known)
        member.connect(self._address)
        self._selector.register(self._socket(member), selectors.EVENT_READ | selectors.EVENT_WRITE, member)
        return False

    def _tick(self, now: float) -> None:
        for member in self._members:
            member.client.loop_misc()
            if member.behaviour is not None:
                member.behaviour.on_tick(now)
