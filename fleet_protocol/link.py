"""The transport over MQTT 5, the same on a board and on the server: a thin shell around paho-mqtt.

The network runs in paho's thread; everything that happens is put into one inbox as a frozen event,
so the owner is a plain loop over a queue with deadlines. The link reconnects by itself with
full-jitter back-off, subscribes again, and counts the bytes of the packets it exchanges.
"""

import contextlib
import logging
import queue
import random
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import MalformedPacket, Properties  # type: ignore[attr-defined]
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from fleet_protocol.errors import ConfigError, TransportError
from fleet_protocol.refusals import remedy, why_not_reached
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
_READ_BYTES = 4096  # asked of the connection at once: many small packets, and little of a large one
_READS_AT_ONCE = 16  # before something is written
# A small message that waits for the other side's acknowledgement waits 40 ms for nothing.
_PROMPTLY = (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
_TAKEN, _NONE = ReasonCode(PacketTypes.PUBACK), Properties(PacketTypes.PUBACK)  # type: ignore[no-untyped-call]


def publish_packet_bytes(topic: str, payload_bytes: int, qos: int) -> int:
    """Size of an MQTT 5 PUBLISH packet without properties."""
    remaining = 2 + len(topic.encode()) + (2 if qos else 0) + 1 + payload_bytes
    length_bytes = 1 + sum(remaining >= limit for limit in (128, 16_384, 2_097_152))
    return 1 + length_bytes + remaining


def _options(qos: int) -> SubscribeOptions:
    """Options of a subscription; retained messages come once, not again with every repetition."""
    return SubscribeOptions(qos=qos, retainHandling=SubscribeOptions.RETAIN_SEND_IF_NEW_SUB)


def _extent(read: bytearray, at: int, filled: int) -> tuple[int, int]:
    """Where the body of a packet begins, and where it ends: beyond what was read as long as that is
    not known.
    """
    size = 0
    for begin in range(at + 1, min(at + 5, filled)):
        size |= (read[begin] & 127) << 7 * (begin - at - 1)
        if read[begin] < 128:
            return begin + 1, begin + 1 + size
    if filled < at + 5:
        return filled, filled + 1
    raise MalformedPacket("the length of a packet does not end")


class LeanClient(paho.Client):
    """paho's client with a reader of its own: many small packets are read at once, and a large one
    to its end.

    What was read together is acknowledged together. A packet that has no properties costs no tables
    of them, and none is copied while it is written. All this stands on the names of paho's own
    methods.
    """

    plain: Callable[[str, bytes, bool], None]  # takes topic, payload, and whether it was retained

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._read = bytearray(
            _READ_BYTES
        )  # as long as the packet that it begins with, if that is longer
        self._filled = 0
        self._acknowledgements = bytearray()

    def _loop(self, timeout: float = 1.0) -> MQTTErrorCode:
        """As paho's; an error of whoever takes a message ends the connection and not the thread."""
        try:
            return super()._loop(timeout)
        except Exception:  # noqa: BLE001  (nobody would start the thread again)
            _LOG.exception("the connection to the broker failed, and is made again")
            return self._loop_rc_handle(MQTTErrorCode.MQTT_ERR_UNKNOWN)

    def loop_read(self, max_packets: int = 1) -> MQTTErrorCode:
        """Take what has come, and acknowledge it."""
        result = MQTTErrorCode.MQTT_ERR_SUCCESS
        count = 0
        room = 0
        for _ in range(max(max_packets, _READS_AT_ONCE)):
            connection: Any = self._sock
            if (
                connection is None
                or result > 0
                or (count < room and not getattr(connection, "pending", int)())
            ):
                break
            room = len(self._read) - self._filled
            try:
                count = connection.recv_into(memoryview(self._read)[self._filled :])
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            except OSError:
                count = 0
            self._filled += count
            try:
                result = self._take_packets() if count else MQTTErrorCode.MQTT_ERR_CONN_LOST
            except MalformedPacket:
                result = MQTTErrorCode.MQTT_ERR_PROTOCOL
        if result > 0 or self._sock is None:
            return self._loop_rc_handle(result)
        with self._msgtime_mutex:
            self._last_bytes_received = time.monotonic()
        if not self._acknowledgements:
            return MQTTErrorCode.MQTT_ERR_SUCCESS
        said: Any = {
            "command": PacketTypes.PUBACK << 4,
            "mid": 0,
            "qos": 1,
            "pos": 0,
            "info": None,
        }
        self._out_packet.append(
            said
            | {
                "packet": self._acknowledgements,
                "to_process": len(self._acknowledgements),
            }
        )
        self._acknowledgements = bytearray()
        return self.loop_write()  # whoever reads also writes, and need not be woken up for it

    def _take_packets(self) -> MQTTErrorCode:
        """Take the packets that are whole, and make room for the rest of the one behind them."""
        read = self._read
        view = memoryview(self._read)
        at = 0
        begin, end = _extent(read, at, self._filled)
        while end <= self._filled:
            result = self._take_packet(read[at], view[begin:end])
            if result > 0 or self._sock is None:
                return result
            at = end
            begin, end = _extent(read, at, self._filled)
        if not at and end <= len(
            read
        ):  # a copy for each piece of a large packet would be quadratic
            return MQTTErrorCode.MQTT_ERR_SUCCESS
        rest = read[at : self._filled]
        self._read, self._filled = bytearray(max(end - at, _READ_BYTES)), len(rest)
        self._read[: len(rest)] = rest
        return MQTTErrorCode.MQTT_ERR_SUCCESS

    def _take_packet(self, command: int, body: memoryview) -> MQTTErrorCode:
        if command & 0xF6 == PacketTypes.PUBLISH << 4 | 2:  # of quality 1
            end = 2 + int.from_bytes(body[:2], "big")
            if len(body) >= end + 3 and not body[end + 2]:
                self.plain(
                    str(body[2:end], errors="replace"),
                    bytes(body[end + 3 :]),
                    bool(command & 1),
                )
                self._acknowledgements += struct.pack(
                    "!BB2s", PacketTypes.PUBACK << 4, 2, bytes(body[end : end + 2])
                )
                return MQTTErrorCode.MQTT_ERR_SUCCESS
        elif command == PacketTypes.PUBACK << 4 and len(body) == 2:
            mid = int.from_bytes(body, "big")
            with self._out_message_mutex:
                known = mid in self._out_messages
                return (
                    self._do_on_publish(mid, _TAKEN, _NONE)
                    if known
                    else MQTTErrorCode.MQTT_ERR_SUCCESS
                )
        self._in_packet |= {
            "command": command,
            "remaining_length": len(body),
            "packet": bytearray(body),
            "pos": 0,
        }
        return self._packet_handle()

    def _packet_queue(self, command: int, packet: Any, *about: Any) -> MQTTErrorCode:
        piecewise: Any = memoryview(packet)
        return super()._packet_queue(command, piecewise, *about)

    def _sock_close(self) -> None:
        self._filled, self._acknowledgements = 0, bytearray()
        super()._sock_close()


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
        self._filters: dict[str, int] = {}
        self._changed = threading.Condition()
        self._unacknowledged: set[int] = set()
        self._early: set[int] = set()
        self._subscribed: set[int] = set()
        self._connected = self._greeted = False
        self._failure = "no answer"
        self.packet_bytes = sys.maxsize
        self._refusals: set[str] = set()
        self._attempt = 0
        self._sent = 0
        self._received = 0
        self._session_expiry_seconds = session_expiry_seconds
        self._client = LeanClient(
            CallbackAPIVersion.VERSION2,
            client_id=client_id,
            protocol=paho.MQTTv5,
            manual_ack=False,
        )
        if will is not None:
            self._client.will_set(will.topic, will.payload, qos=1, retain=True)
        if address.username is not None:
            self._client.username_pw_set(address.username, address.password)
        if address.tls:
            self._set_tls(address)
        self._client.max_inflight_messages_set(2 * SEND_WINDOW)
        self._client.on_connect = self._on_connect
        self._client.on_socket_open = lambda _, __, its: its.setsockopt(*_PROMPTLY)  # type: ignore[attr-defined]
        self._client.on_connect_fail = self._on_connect_fail
        self._client.on_disconnect = self._on_disconnect
        self._client.on_message = self._on_message
        self._client.plain = self._take
        self._client.on_publish = self._on_publish
        self._client.on_subscribe = self._on_subscribe

    def _set_tls(self, address: BrokerAddress) -> None:
        files = (address.ca_file, address.cert_file, address.key_file)
        try:
            ca, cert, key = (str(file) if file else None for file in files)
            self._client.tls_set(ca_certs=ca, certfile=cert, keyfile=key)
        except (OSError, ValueError) as error:
            named = ", ".join(str(file) for file in files if file)
            raise ConfigError(
                f"cannot use the certificate files {named} for {address}: {error}"
            ) from error

    # What paho's thread calls.

    def _next_delay(self) -> None:
        ceiling = min(BACKOFF_MAX_SECONDS, BACKOFF_FIRST_SECONDS * 2**self._attempt)
        self._attempt = min(self._attempt + 1, 16)
        # Full jitter, so that a fleet does not come back in step; not a secret.
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
            self._failed(f"the broker refuses it ({reason}); {remedy(str(reason))}")
            return
        self.packet_bytes = getattr(properties, "MaximumPacketSize", sys.maxsize)
        with self._changed:
            self._connected = self._greeted = True
            self._failure = ""
            self._attempt = 0
            filters = dict(self._filters)
            self._changed.notify_all()
        # Also where the session is present: a broker that was killed may have brought back an older
        # one.
        for topic_filter, qos in filters.items():
            client.subscribe(topic_filter, options=_options(qos))
        self._inbox.put(Connected(session_present=bool(flags.session_present)))

    def _on_connect_fail(self, _client: paho.Client, _data: object) -> None:
        self._failed(
            why_not_reached(sys.exc_info()[1])
        )  # paho calls this while it handles the error

    def _failed(self, why: str) -> None:
        """Keep what prevents a connection.

        Where one was lost nobody else says it, so it is logged once.
        """
        self._next_delay()
        with self._changed:
            if self._greeted and why != self._failure:
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
        self._next_delay()
        self._inbox.put(Disconnected(str(reason)))

    def _on_message(self, _client: paho.Client, _data: object, message: paho.MQTTMessage) -> None:
        with contextlib.suppress(
            UnicodeDecodeError
        ):  # the topic is no text: paho's thread must outlive that
            self._take(message.topic, bytes(message.payload), bool(message.retain), message.qos)

    def _take(self, topic: str, payload: bytes, retained: bool, qos: int = 1) -> None:
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
                self._early.add(mid)

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

    # What the owner calls.

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
            f"cannot connect to the broker at {self.address} within {timeout_seconds:g} s: {self._failure}. "
            "Is it running, and are address and login right?"
        )

    def subscribe(self, topic_filter: str, qos: int = 1, timeout_seconds: float = 10.0) -> None:
        """Subscribe, now and after every reconnect, and wait until the broker has confirmed it."""
        with self._changed:
            self._filters[topic_filter] = qos
        result, mid = self._client.subscribe(topic_filter, options=_options(qos))
        if result != paho.MQTT_ERR_SUCCESS or mid is None or not timeout_seconds:
            return  # not connected: done in _on_connect
        with self._changed:
            done = self._changed.wait_for(
                lambda: mid in self._subscribed or not self._connected, timeout_seconds
            )
            self._subscribed.discard(mid)
        if not done:
            raise TransportError(
                f"the broker at {self.address} does not confirm the subscription to {topic_filter}"
            )

    def unsubscribe(self, topic_filter: str) -> None:
        """Forget a subscription."""
        with self._changed:
            self._filters.pop(topic_filter, None)
        self._client.unsubscribe(topic_filter)

    def publish(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> None:
        """Hand a message to the network thread; while the broker is away it waits there."""
        size = publish_packet_bytes(topic, len(payload), qos)
        if size > self.packet_bytes:
            raise TransportError(
                f"cannot send to {topic}: the broker at {self.address} takes packets of {self.packet_bytes:,} bytes, "
                f"and this one has {size:,}; {remedy('Packet too large')}"
            )
        info = self._client.publish(topic, payload, qos=qos, retain=retain)
        if info.rc not in {paho.MQTT_ERR_SUCCESS, paho.MQTT_ERR_NO_CONN}:
            raise TransportError(f"cannot send to {topic}: {paho.error_string(info.rc)}")
        self._sent += size
        self._received += PUBACK_BYTES if qos else 0
        with self._changed:
            if info.mid in self._early:
                self._early.discard(info.mid)
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
            if not self._changed.wait_for(
                lambda: len(self._unacknowledged) <= at_most,
                max(0.0, deadline - time.monotonic()),
            ):
                raise TransportError(
                    f"the broker at {self.address} has not acknowledged {len(self._unacknowledged)} messages in time"
                )

    def close(self, farewell: Farewell | None = None, timeout_seconds: float = 2.0) -> None:
        """Disconnect for good."""
        if farewell is not None and self._connected:
            with contextlib.suppress(TransportError):
                self.publish(farewell.topic, farewell.payload, retain=True)
                self.drain(time.monotonic() + timeout_seconds)
        self._client.disconnect()
        self._client.loop_stop()
        # The pair that wakes paho's thread would be left to the garbage collector, which warns of
        # open sockets.
        self._client._reset_sockets(sockpair_only=True)  # noqa: SLF001  (paho has no other word for it)
