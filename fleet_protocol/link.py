"""The transport over MQTT 5, the same on a board and on the server: a thin shell around paho-mqtt.

The network runs in paho's thread, which puts everything that happens into one inbox as a frozen
event, so that the owner is a plain loop over a queue with deadlines. The link reconnects by itself
with full-jitter back-off, subscribes again, and counts the bytes of the packets it exchanges.
"""

import contextlib
import logging
import queue
import random
import socket
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from fleet_protocol.errors import TransportError
from fleet_protocol.lean_client import LeanClient
from fleet_protocol.refusals import remedy, why_not_reached
from fleet_protocol.tls_connection import tls_context
from fleet_protocol.transport import (
    BACKOFF_MAX_SECONDS,
    SEND_WINDOW,
    BrokerAddress,
    Connected,
    Disconnected,
    Event,
    Farewell,
    Received,
    WireCount,
)

_LOG = logging.getLogger(__name__)
KEEP_ALIVE_SECONDS = 20  # a dead board is noticed after one and a half of these
BACKOFF_FIRST_SECONDS = 0.5
PUBACK_BYTES = 4
_MOST_DOUBLINGS = 16  # of the back-off; more would overflow a float at last
# Without this a small message that waits for the other side's acknowledgement waits 40 ms longer.
_NO_DELAY = (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def publish_packet_bytes(
    topic: str,
    payload_bytes: int,
    qos: int,
) -> int:
    """Return the size of an MQTT 5 PUBLISH packet without properties."""
    identifier_bytes = 2 if qos else 0
    remaining = 2 + len(topic.encode()) + identifier_bytes + 1 + payload_bytes
    length_bytes = 1
    for limit in (128, 16_384, 2_097_152):
        length_bytes += remaining >= limit
    return 1 + length_bytes + remaining


def _options(qos: int) -> SubscribeOptions:
    """Return options of a subscription.

    Retained messages come once, and not again with every repetition of the subscription.
    """
    return SubscribeOptions(qos=qos, retainHandling=SubscribeOptions.RETAIN_SEND_IF_NEW_SUB)


class Link:
    """A `fleet_protocol.transport.Transport` over MQTT.

    Arguments and errors are those of `open_transport`.
    """

    authentic = False

    def __init__(
        self,
        address: BrokerAddress,
        client_id: str,
        inbox: queue.SimpleQueue[Event],
        *,
        will: Farewell | None = None,
        session_expiry_seconds: int = 3600,
    ) -> None:
        self.address = address
        self._inbox = inbox
        self._filters: dict[str, int] = {}  # topic filters with their quality of service
        # Guards the state below that both threads use, and wakes the owner when it changes.
        self._changed = threading.Condition()
        self._unacknowledged: set[int] = set()  # ids of messages
        # Acknowledged before `publish` has returned its id.
        self._acknowledged_early: set[int] = set()
        self._subscribed: set[int] = set()
        self._connected = False
        self._was_connected = False
        self._failure = "no answer"
        self.packet_bytes = sys.maxsize
        self._refusals: set[str] = set()  # reasons of the broker that were logged
        self._attempt = 0
        self._sent = 0
        self._received = 0
        self._session_expiry_seconds = session_expiry_seconds
        self._client = self._make_client(client_id, will)

    def _make_client(self, client_id: str, will: Farewell | None) -> LeanClient:
        client = LeanClient(
            CallbackAPIVersion.VERSION2,
            client_id=client_id,
            protocol=paho.MQTTv5,
            manual_ack=False,
        )
        if will is not None:
            client.will_set(will.topic, will.payload, qos=1, retain=True)
        if self.address.username is not None:
            client.username_pw_set(self.address.username, self.address.password)
        if self.address.tls:
            client.tls_set_context(tls_context(self.address))
        client.max_inflight_messages_set(2 * SEND_WINDOW)
        client.on_connect = self._on_connect
        client.on_socket_open = self._on_socket_open
        client.on_connect_fail = self._on_connect_fail
        client.on_disconnect = self._on_disconnect
        client.on_message = self._on_message
        client.on_plain_message = self._receive
        client.on_publish = self._on_publish
        client.on_subscribe = self._on_subscribe
        return client

    # Methods that paho's thread calls.

    @staticmethod
    def _on_socket_open(
        _client: paho.Client,
        _data: object,
        connection: Any,
    ) -> None:
        connection.setsockopt(*_NO_DELAY)

    def _choose_delay(self) -> None:
        """Choose how long to wait before the next attempt to connect."""
        ceiling = min(BACKOFF_MAX_SECONDS, BACKOFF_FIRST_SECONDS * 2**self._attempt)
        self._attempt = min(self._attempt + 1, _MOST_DOUBLINGS)
        # Full jitter, so that the boards of a fleet do not return at the same time; not a secret.
        delay: Any = random.uniform(BACKOFF_FIRST_SECONDS / 2, ceiling)  # noqa: S311
        self._client.reconnect_delay_set(delay, delay)

    def _on_connect(
        self,
        client: paho.Client,
        _data: object,
        flags: Any,
        reason: Any,
        properties: Any,
    ) -> None:
        if reason.is_failure:
            self._note_failure(f"the broker refuses it ({reason}); {remedy(str(reason))}")
            return
        self.packet_bytes = getattr(properties, "MaximumPacketSize", sys.maxsize)
        with self._changed:
            self._connected = True
            self._was_connected = True
            self._failure = ""
            self._attempt = 0
            filters = dict(self._filters)
            self._changed.notify_all()
        # Even if the broker knows the session: after a crash it may have restored an older state.
        for topic_filter, qos in filters.items():
            client.subscribe(topic_filter, options=_options(qos))
        self._inbox.put(Connected(session_present=bool(flags.session_present)))

    def _on_connect_fail(self, _client: paho.Client, _data: object) -> None:
        # paho calls this while it handles the error.
        self._note_failure(why_not_reached(sys.exc_info()[1]))

    def _note_failure(self, why: str) -> None:
        """Note what prevents a connection.

        `connect` reports it for the first connection. For a later one nobody else does, so it is
        logged once.
        """
        self._choose_delay()
        with self._changed:
            if self._was_connected and why != self._failure:
                _LOG.warning(
                    "no connection to the broker at %s: %s; trying again",
                    self.address,
                    why,
                )
            self._failure = why
            self._changed.notify_all()

    def _on_disconnect(
        self,
        _client: paho.Client,
        _data: object,
        _flags: Any,
        reason: Any,
        _properties: Any,
    ) -> None:
        with self._changed:
            self._connected = False
            self._changed.notify_all()
        self._choose_delay()
        self._inbox.put(Disconnected(str(reason)))

    def _on_message(
        self,
        _client: paho.Client,
        _data: object,
        message: paho.MQTTMessage,
    ) -> None:
        # A topic that is not UTF-8 must not end paho's thread.
        with contextlib.suppress(UnicodeDecodeError):
            self._receive(message.topic, bytes(message.payload), bool(message.retain), message.qos)

    def _receive(
        self,
        topic: str,
        payload: bytes,
        retained: bool,
        qos: int = 1,
    ) -> None:
        self._received += publish_packet_bytes(topic, len(payload), qos)
        self._sent += PUBACK_BYTES if qos else 0
        self._inbox.put(Received(topic, payload, retained))

    def _on_publish(
        self,
        _client: paho.Client,
        _data: object,
        mid: int,
        reason: Any,
        _properties: Any,
    ) -> None:
        if reason.is_failure and str(reason) not in self._refusals:
            self._refusals.add(str(reason))
            _LOG.error(
                "the broker at %s refuses a message (%s); %s",
                self.address,
                reason,
                remedy(str(reason)),
            )
        with self._changed:
            if mid in self._unacknowledged:
                self._unacknowledged.discard(mid)
                self._changed.notify_all()
            else:
                self._acknowledged_early.add(mid)

    def _on_subscribe(
        self,
        _client: paho.Client,
        _data: object,
        mid: int,
        _reasons: Any,
        _properties: Any,
    ) -> None:
        with self._changed:
            self._subscribed.add(mid)
            self._changed.notify_all()

    # Methods that the owner calls.

    @property
    def connected(self) -> bool:
        """Whether the broker is there now."""
        return self._connected

    @property
    def wire(self) -> WireCount:
        """Bytes exchanged so far."""
        return WireCount(sent=self._sent, received=self._received)

    def connect(self, timeout_seconds: float = 30.0) -> None:
        """Connect for the first time and start the network thread."""
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.SessionExpiryInterval = self._session_expiry_seconds
        self._client.connect_async(
            self.address.host,
            self.address.port,
            keepalive=KEEP_ALIVE_SECONDS,
            clean_start=False,
            properties=properties,
        )
        self._client.loop_start()
        with self._changed:
            if self._changed.wait_for(lambda: self._connected, timeout_seconds):
                return
        self.close()
        raise TransportError(
            f"cannot connect to the broker at {self.address} within {timeout_seconds:g} s: "
            f"{self._failure}. Is it running, and are address and login right?"
        )

    def subscribe(
        self,
        topic_filter: str,
        qos: int = 1,
        timeout_seconds: float = 10.0,
    ) -> None:
        """Subscribe, now and after every reconnect, and wait until the broker has confirmed it."""
        with self._changed:
            self._filters[topic_filter] = qos
        result, mid = self._client.subscribe(topic_filter, options=_options(qos))
        if result != paho.MQTT_ERR_SUCCESS or mid is None or not timeout_seconds:
            return  # not connected: _on_connect subscribes
        with self._changed:
            is_confirmed = self._changed.wait_for(
                lambda: mid in self._subscribed or not self._connected, timeout_seconds
            )
            self._subscribed.discard(mid)
        if not is_confirmed:
            raise TransportError(
                f"the broker at {self.address} does not confirm the subscription to {topic_filter}"
            )

    def unsubscribe(self, topic_filter: str) -> None:
        """End a subscription."""
        with self._changed:
            self._filters.pop(topic_filter, None)
        self._client.unsubscribe(topic_filter)

    def publish(
        self,
        topic: str,
        payload: bytes,
        *,
        qos: int = 1,
        retain: bool = False,
    ) -> None:
        """Hand a message to the network thread; while the broker is away it waits there."""
        size = publish_packet_bytes(topic, len(payload), qos)
        if size > self.packet_bytes:
            raise TransportError(
                f"cannot send to {topic}: the broker at {self.address} takes packets of "
                f"{self.packet_bytes:,} bytes, and this one has {size:,}; "
                f"{remedy('Packet too large')}"
            )
        info = self._client.publish(topic, payload, qos=qos, retain=retain)
        if info.rc not in {paho.MQTT_ERR_SUCCESS, paho.MQTT_ERR_NO_CONN}:
            raise TransportError(f"cannot send to {topic}: {paho.error_string(info.rc)}")
        self._sent += size
        self._received += PUBACK_BYTES if qos else 0
        with self._changed:
            if info.mid in self._acknowledged_early:
                self._acknowledged_early.discard(info.mid)
            else:
                self._unacknowledged.add(info.mid)

    def publish_stream(self, messages: Iterable[tuple[str, bytes]], deadline: float) -> int:
        """Send many payloads without ever holding more than a window of them in memory."""
        count = 0
        for topic, payload in messages:
            self.drain(deadline, SEND_WINDOW - 1)
            self.publish(topic, payload)
            count += 1
        return count

    def drain(self, deadline: float, at_most: int = 0) -> None:
        """Wait until the broker has acknowledged what was sent."""
        with self._changed:
            is_drained = self._changed.wait_for(
                lambda: len(self._unacknowledged) <= at_most,
                max(0.0, deadline - time.monotonic()),
            )
            if not is_drained:
                raise TransportError(
                    f"the broker at {self.address} has not acknowledged "
                    f"{len(self._unacknowledged)} messages in time"
                )

    def close(self, farewell: Farewell | None = None, timeout_seconds: float = 2.0) -> None:
        """Disconnect for good."""
        if farewell is not None and self._connected:
            with contextlib.suppress(TransportError):
                self.publish(farewell.topic, farewell.payload, retain=True)
                self.drain(time.monotonic() + timeout_seconds)
        self._client.disconnect()
        self._client.loop_stop()
        self._client.close_wakeup_sockets()
