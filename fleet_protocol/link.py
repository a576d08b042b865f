"""The transport over MQTT 5, for boards and the server: a thin layer around paho-mqtt.

The network runs in paho's thread, which puts all events into one inbox as frozen values, so that
the owner is a plain loop over a queue with deadlines. The link reconnects by itself
(`fleet_protocol.attempts`), subscribes again, and counts the bytes of the packets it exchanges. A
message or subscription that the broker refuses (`fleet_protocol.refusals`) is not sent again: the
refusal is an event.
"""

import contextlib
import logging
import queue
import socket
import sys
import time
from collections.abc import Iterable
from shlex import quote
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from fleet_protocol.attempts import Attempts
from fleet_protocol.errors import (
    BrokerRefusedError,
    RefusalReason,
    RefusedError,
    TransportError,
)
from fleet_protocol.folded_lines import FoldedLines
from fleet_protocol.lean_client import LeanClient
from fleet_protocol.outstanding import Outstanding, SentPacket
from fleet_protocol.packets import PUBACK_BYTES, publish_packet_bytes
from fleet_protocol.refusals import FIRST_FAILURE, PACKET_TOO_LARGE, explain, why_ended
from fleet_protocol.subscriptions import Subscriptions
from fleet_protocol.tls_connection import tls_context
from fleet_protocol.topics import may_be_retained
from fleet_protocol.transport import (
    SEND_WINDOW,
    BrokerAddress,
    Connected,
    Disconnected,
    Event,
    Farewell,
    Received,
    Refused,
    Rejected,
    WireCount,
)

_LOG = logging.getLogger(__name__)
KEEP_ALIVE_SECONDS = 20  # a dead board is noticed after one and a half of these intervals
# Without this, a small message that waits for the other side's acknowledgement is delayed by 40 ms.
_NO_DELAY = (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Link:
    """A `fleet_protocol.transport.Transport` over MQTT.

    The arguments and errors are those of `open_transport`.
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
        self._outstanding = Outstanding()
        # Guards the state below that both threads use, and wakes the owner when it changes.
        self._changed = self._outstanding.changed
        self._subscriptions = Subscriptions(self._changed, self._request_subscription)
        self._lines = FoldedLines(lambda level, line: _LOG.log(level, "%s", line))
        self._attempts = Attempts(address, self._changed, inbox, lines=self._lines, wait=self._wait)
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

    def _on_socket_open(self, _client: paho.Client, _data: object, connection: Any) -> None:
        self._attempts.begin()
        self._client.read_error = None
        connection.setsockopt(*_NO_DELAY)

    def _wait(self, seconds: float) -> None:
        """Set how long paho waits before the next attempt to connect."""
        delay: Any = seconds
        # Equal bounds, because paho doubles its delay between them.
        self._client.reconnect_delay_set(delay, delay)

    def _on_connect(
        self, client: Any, _data: object, flags: Any, reason: Any, properties: Any
    ) -> None:
        if reason.is_failure:
            self._attempts.note_refused_login(client.reasons[0])
            return
        self._outstanding.note_limit(getattr(properties, "MaximumPacketSize", sys.maxsize))
        self._attempts.note_connection()
        # Before the owner learns of the connection and relies on its subscriptions.
        self._subscriptions.renew()
        self._inbox.put(Connected(session_present=bool(flags.session_present)))

    def _on_connect_fail(self, _client: paho.Client, _data: object) -> None:
        # paho calls this while it handles the error.
        self._attempts.note_error(sys.exc_info()[1])

    def _on_disconnect(
        self, client: Any, _data: object, flags: Any, reason: Any, _properties: Any
    ) -> None:
        code: int | None = None
        if flags.is_disconnect_packet_from_server:
            code = client.reasons[0] if client.reasons else 0
        if not self._attempts.note_end():
            self._attempts.note_end_of_attempt(client.read_error)
            return
        limit = self._outstanding.packet_bytes
        dropped = self._outstanding.drop_refused(code)
        # The message for which the broker ended the connection is not sent again.
        client.forget_messages(dropped)
        is_learnt = self._outstanding.packet_bytes < limit
        self._attempts.wait_lost(code, forgiven=is_learnt)
        self._inbox.put(Disconnected(why_ended(code, reason), code))
        self._note_refusals(dropped.values())

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
        if retained and not may_be_retained(topic):
            why = (
                f"a message on {topic} that the broker has retained, so it may be old: delete it"
                f" there (mosquitto_pub -r -n -t {quote(topic)})"
            )
            self._inbox.put(Rejected(topic, RefusedError(RefusalReason.REPLAYED, why)))
            return
        self._inbox.put(Received(topic, payload, retained))

    def _on_publish(
        self, client: Any, _data: object, mid: int, code: Any, _properties: Any
    ) -> None:
        dropped = self._outstanding.acknowledge(mid, code)
        client.forget_messages(dropped.keys() - {mid})  # paho finishes this one itself
        self._note_refusals(dropped.values())

    def _note_refusals(self, refusals: Iterable[Refused]) -> None:
        """Log the broker's refusal, and forward it to the owner."""
        for refused in refusals:
            kind = "message" if refused.packet_bytes else "subscription"
            self._lines.error(
                f"{kind} {refused.code}",
                f"the broker at {self.address} refuses {refused} {explain(refused.code)}",
            )
            self._inbox.put(refused)

    def _on_subscribe(
        self, client: Any, _data: object, mid: int, _reasons: Any, _properties: Any
    ) -> None:
        # Codes below 0x80 are granted qualities of service, so the largest shows a failure.
        code = max(client.reasons, default=0)
        self._note_refusals(self._subscriptions.answer(mid, code))

    # Methods that the owner calls.

    @property
    def connected(self) -> bool:
        """Whether the broker is connected now."""
        return self._attempts.connected

    @property
    def packet_bytes(self) -> int:
        """Size of the largest packet that the broker accepts, as far as is known."""
        return self._outstanding.packet_bytes

    @property
    def wire(self) -> WireCount:
        """Bytes exchanged so far."""
        return WireCount(sent=self._sent, received=self._received)

    def connect(self, timeout_seconds: float = 30.0) -> None:
        """Connect for the first time and start the network thread."""
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        # The broker keeps the subscriptions and messages of a connection that is lost for so long.
        properties.SessionExpiryInterval = self._session_expiry_seconds
        self._client.connect_async(
            self.address.host,
            self.address.port,
            keepalive=KEEP_ALIVE_SECONDS,
            clean_start=False,
            properties=properties,
        )
        self._client.loop_start()
        try:
            self._attempts.await_first(timeout_seconds)
        except TransportError:
            self.close()
            raise

    def subscribe(
        self,
        topic_filter: str,
        qos: int = 1,
        timeout_seconds: float = 10.0,
    ) -> None:
        """Subscribe, now and after every reconnect, and wait until the broker has confirmed it."""
        code = self._subscriptions.add(
            topic_filter, qos, timeout_seconds, lambda: not self.connected
        )
        if code is None:
            raise TransportError(
                f"the broker at {self.address} does not confirm the subscription to {topic_filter}"
            )
        if code >= FIRST_FAILURE:
            refused = Refused(topic_filter, code)
            raise BrokerRefusedError(
                code, f"the broker at {self.address} refuses {refused} {explain(code)}"
            )

    def _request_subscription(self, topic_filter: str, qos: int) -> int | None:
        # Retained messages arrive once, and not again with every repetition of the subscription.
        options = SubscribeOptions(qos=qos, retainHandling=SubscribeOptions.RETAIN_SEND_IF_NEW_SUB)
        result, packet = self._client.subscribe(topic_filter, options=options)
        return packet if result == paho.MQTT_ERR_SUCCESS else None

    def unsubscribe(self, topic_filter: str) -> None:
        """End a subscription."""
        self._subscriptions.remove(topic_filter)
        self._client.unsubscribe(topic_filter)

    def publish(
        self,
        topic: str,
        payload: bytes,
        *,
        qos: int = 1,
        retain: bool = False,
    ) -> None:
        """Pass a message to the network thread; it waits there while the broker is unreachable."""
        size = publish_packet_bytes(topic, len(payload), qos)
        if size > self.packet_bytes:
            raise BrokerRefusedError(
                PACKET_TOO_LARGE,
                f"cannot send to {topic}: the broker at {self.address} accepts packets of "
                f"{self.packet_bytes:,} bytes, but this one has {size:,} "
                f"{explain(PACKET_TOO_LARGE)}",
            )
        packet = SentPacket(topic, size)
        self._outstanding.begin(packet)
        try:
            info = self._client.publish(topic, payload, qos=qos, retain=retain)
        except ValueError:
            # A topic or payload that paho does not accept is never in transit.
            self._outstanding.cancel(packet)
            raise
        if info.rc not in {paho.MQTT_ERR_SUCCESS, paho.MQTT_ERR_NO_CONN}:
            self._outstanding.cancel(packet)
            raise TransportError(f"cannot send to {topic}: {paho.error_string(info.rc)}")
        self._sent += size
        self._received += PUBACK_BYTES if qos else 0
        refused = self._outstanding.add(info.mid, packet)
        self._client.forget_messages(refused)
        self._note_refusals(refused.values())

    def publish_stream(self, messages: Iterable[tuple[str, bytes]], deadline: float) -> int:
        """Send many payloads with at most a window of them in memory."""
        count = 0
        for topic, payload in messages:
            self.drain(deadline, SEND_WINDOW - 1)
            self.publish(topic, payload)
            count += 1
        return count

    def drain(self, deadline: float, at_most: int = 0) -> None:
        """Wait until the broker has acknowledged what was sent."""
        with self._changed:
            seconds = max(0.0, deadline - time.monotonic())
            if not self._changed.wait_for(lambda: len(self._outstanding) <= at_most, seconds):
                count = len(self._outstanding)
                raise TransportError(
                    f"the broker at {self.address} has not acknowledged {count} messages in time"
                )

    def close(self, farewell: Farewell | None = None, timeout_seconds: float = 2.0) -> None:
        """Disconnect for good."""
        # A clean disconnect prevents the will, so its message is sent here.
        if farewell is not None and self.connected:
            with contextlib.suppress(TransportError):
                self.publish(farewell.topic, farewell.payload, retain=True)
                self.drain(time.monotonic() + timeout_seconds)
        self._client.disconnect()
        self._client.loop_stop()
        self._client.close_wakeup_sockets()
