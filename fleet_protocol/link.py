"""The transport over MQTT 5, the same on a board and on the server: a thin shell around paho-mqtt.

The network runs in paho's thread, which puts everything that happens into one inbox as a frozen
event, so that the owner is a plain loop over a queue with deadlines. The link reconnects by itself
(`fleet_protocol.backoff`), subscribes again, and counts the bytes of the packets it exchanges. What
the broker refuses (`fleet_protocol.refusals`) is not sent again: it is an event, too.
"""

import contextlib
import logging
import queue
import socket
import sys
import time
from collections.abc import Iterable
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from fleet_protocol.backoff import Backoff
from fleet_protocol.errors import BrokerRefusedError, TransportError
from fleet_protocol.folded_lines import FoldedLines
from fleet_protocol.lean_client import LeanClient
from fleet_protocol.outstanding import Outstanding, SentPacket
from fleet_protocol.packets import PUBACK_BYTES, publish_packet_bytes
from fleet_protocol.refusals import (
    CERTIFICATE_REFUSED,
    FIRST_FAILURE,
    PACKET_TOO_LARGE,
    Reaction,
    explain,
    is_certificate_alert,
    is_refused_certificate,
    refusal_of_code,
    why_ended,
    why_not_reached,
)
from fleet_protocol.subscriptions import Subscriptions
from fleet_protocol.tls_connection import tls_context
from fleet_protocol.transport import (
    SEND_WINDOW,
    BrokerAddress,
    Connected,
    Disconnected,
    Event,
    Farewell,
    LoginRefused,
    Received,
    Refused,
    WireCount,
)

_LOG = logging.getLogger(__name__)
KEEP_ALIVE_SECONDS = 20  # a dead board is noticed after one and a half of these
# Without this a small message that waits for the other side's acknowledgement waits 40 ms longer.
_NO_DELAY = (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


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
        self._outstanding = Outstanding()
        # Guards the state below that both threads use, and wakes the owner when it changes.
        self._changed = self._outstanding.changed
        self._subscriptions = Subscriptions(self._changed, self._request_subscription)
        self._connected = False
        self._was_connected = False
        self._failure = "no answer"
        self._is_answered = False  # the attempt to connect, whatever the answer
        self._refused_for: int | None = None  # why the broker refuses this client
        self._lines = FoldedLines(lambda level, line: _LOG.log(level, "%s", line))
        self._backoff = Backoff()
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
        self._is_answered = False
        self._client.read_error = None
        connection.setsockopt(*_NO_DELAY)

    def _wait(self, seconds: float) -> None:
        """Set how long paho waits before the next attempt to connect."""
        delay: Any = seconds
        self._client.reconnect_delay_set(delay, delay)

    def _on_connect(
        self, client: Any, _data: object, flags: Any, reason: Any, properties: Any
    ) -> None:
        self._is_answered = True
        if reason.is_failure:
            self._note_refused_connection(client.reasons[0])
            return
        self._outstanding.note_limit(getattr(properties, "MaximumPacketSize", sys.maxsize))
        self._backoff.note_connection(time.monotonic())
        with self._changed:
            self._connected = True
            self._was_connected = True
            self._failure = ""
            self._refused_for = None
            self._changed.notify_all()
        self._subscriptions.renew()
        self._inbox.put(Connected(session_present=bool(flags.session_present)))

    def _note_refused_connection(self, code: int) -> None:
        """Note that the broker refuses this client, which is asked again less and less often."""
        self._note_failure(f"the broker refuses it {explain(code)}")
        refusal = refusal_of_code(code)
        if refusal.connection is not Reaction.STOP:
            self._wait(self._backoff.wait_lost(time.monotonic()))
            return
        self._wait(self._backoff.wait_refused())
        with self._changed:
            self._refused_for = refusal.code
            self._changed.notify_all()
        if self._was_connected:
            self._inbox.put(LoginRefused(refusal.code))

    def _on_connect_fail(self, _client: paho.Client, _data: object) -> None:
        # paho calls this while it handles the error.
        error = sys.exc_info()[1]
        if is_certificate_alert(error):
            self._note_refused_connection(CERTIFICATE_REFUSED)
            return
        self._note_failure(why_not_reached(error))
        refused = is_refused_certificate(error)
        self._wait(self._backoff.wait_refused() if refused else self._backoff.wait_unreached())

    def _note_failure(self, why: str) -> None:
        """Note what prevents a connection.

        `connect` reports it for the first connection. For a later one nobody else does, so it is
        logged.
        """
        with self._changed:
            if self._was_connected and why != self._failure:
                self._lines.warning(
                    why, f"no connection to the broker at {self.address}: {why}; trying again"
                )
            self._failure = why
            self._changed.notify_all()

    def _on_disconnect(
        self, client: Any, _data: object, flags: Any, reason: Any, _properties: Any
    ) -> None:
        code: int | None = None
        if flags.is_disconnect_packet_from_server:
            code = client.reasons[0] if client.reasons else 0
        with self._changed:
            was_connected = self._connected
            self._connected = False
            self._changed.notify_all()
        if not was_connected:
            # One that the broker has refused was noted before.
            if is_certificate_alert(client.read_error):
                self._note_refused_connection(CERTIFICATE_REFUSED)
            elif not self._is_answered:
                self._note_failure("it ends the connection and gives no reason")
                self._wait(self._backoff.wait_lost(time.monotonic()))
            return
        dropped = self._outstanding.drop_refused(code)
        if dropped:
            # What the broker ended the connection for is not sent again.
            client.forget_messages(dropped)
            self._backoff.forgive()
        delay = self._backoff.wait_lost(time.monotonic())
        if code and refusal_of_code(code).connection is Reaction.STOP:
            delay = self._backoff.wait_refused()
        self._wait(delay)
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
        self._inbox.put(Received(topic, payload, retained))

    def _on_publish(
        self, client: Any, _data: object, mid: int, code: Any, _properties: Any
    ) -> None:
        dropped = self._outstanding.acknowledge(mid, code)
        client.forget_messages(dropped.keys() - {mid})  # paho finishes this one itself
        self._note_refusals(dropped.values())

    def _note_refusals(self, refusals: Iterable[Refused]) -> None:
        """Log what the broker refuses, and pass it on to the owner."""
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
        code = max(client.reasons, default=0)
        self._note_refusals(self._subscriptions.answer(mid, code))

    # Methods that the owner calls.

    @property
    def connected(self) -> bool:
        """Whether the broker is there now."""
        return self._connected

    @property
    def packet_bytes(self) -> int:
        """Size of the largest packet that the broker takes, as far as is known."""
        return self._outstanding.packet_bytes

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
            self._changed.wait_for(
                lambda: self._connected or self._refused_for is not None, timeout_seconds
            )
            if self._connected:
                return
            refused_for = self._refused_for
            failure = self._failure
        self.close()
        if refused_for is not None:
            raise BrokerRefusedError(
                refused_for, f"cannot connect to the broker at {self.address}: {failure}"
            )
        raise TransportError(
            f"cannot connect to the broker at {self.address} within {timeout_seconds:g} s: "
            f"{failure}. Is it running, and are host and port right?"
        )

    def subscribe(
        self,
        topic_filter: str,
        qos: int = 1,
        timeout_seconds: float = 10.0,
    ) -> None:
        """Subscribe, now and after every reconnect, and wait until the broker has confirmed it."""
        code = self._subscriptions.add(
            topic_filter, qos, timeout_seconds, lambda: not self._connected
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
        # Retained messages come once, and not again with every repetition of the subscription.
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
        """Hand a message to the network thread; while the broker is away it waits there."""
        size = publish_packet_bytes(topic, len(payload), qos)
        if size > self.packet_bytes:
            raise BrokerRefusedError(
                PACKET_TOO_LARGE,
                f"cannot send to {topic}: the broker at {self.address} takes packets of "
                f"{self.packet_bytes:,} bytes, and this one has {size:,} "
                f"{explain(PACKET_TOO_LARGE)}",
            )
        info = self._client.publish(topic, payload, qos=qos, retain=retain)
        if info.rc not in {paho.MQTT_ERR_SUCCESS, paho.MQTT_ERR_NO_CONN}:
            raise TransportError(f"cannot send to {topic}: {paho.error_string(info.rc)}")
        self._sent += size
        self._received += PUBACK_BYTES if qos else 0
        refused = self._outstanding.add(info.mid, SentPacket(topic, size))
        self._note_refusals(refused.values())

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
            seconds = max(0.0, deadline - time.monotonic())
            if not self._changed.wait_for(lambda: len(self._outstanding) <= at_most, seconds):
                count = len(self._outstanding)
                raise TransportError(
                    f"the broker at {self.address} has not acknowledged {count} messages in time"
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
