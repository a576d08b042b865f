"""A paho client with a faster reader for many small packets and for large ones.

It forwards every reason code of a broker, including those unknown to paho, which would end the
connection with an error.

It overrides methods of paho and uses its private state, all listed in `PAHO_NAMES`; a test compares
these names with the installed version of paho.
"""

import logging
import ssl
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import MQTTErrorCode
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import MalformedPacket, Properties  # type: ignore[attr-defined]
from paho.mqtt.reasoncodes import ReasonCode

PAHO_NAMES = frozenset(
    {
        # Overridden methods.
        "_loop",
        "_packet_queue",
        "_packet_write",
        "_sock_close",
        # Methods that are called.
        "_do_on_publish",
        "_loop_rc_handle",
        "_packet_handle",
        "_reset_sockets",
        # State that is read or written.
        "_in_packet",
        "_inflight_messages",
        "_last_bytes_received",
        "_msgtime_mutex",
        "_out_message_mutex",
        "_out_messages",
        "_out_packet",
        "_sock",
    }
)
"""Private names of `paho.mqtt.client.Client` that `LeanClient` uses."""

_LOG = logging.getLogger(__name__)
# Bytes that are read at once: many small packets, and little of a large one.
_READ_BYTES = 4096
_READS_AT_ONCE = 16  # before something is written
_READS_AFTER_THE_END = 1000  # of a connection; more than a system keeps for a program
_PUBLISH_OF_QOS_1 = PacketTypes.PUBLISH << 4 | 2
_PUBLISH_FLAGS = 0xF6  # bits of the command without retained (1) and repeated (8)
_ACKNOWLEDGEMENT = PacketTypes.PUBACK << 4
# By code and name, the types of packets that may have it.
_PAHO_REASONS: Mapping[int, Mapping[str, Iterable[int]]] = ReasonCode(PacketTypes.CONNACK).names
_FIRST_FAILURE = 0x80  # of reason codes; paho accepts this one in every packet
_NO_PROPERTIES = Properties(PacketTypes.PUBACK)  # type: ignore[no-untyped-call]


class LeanClient(paho.Client):
    """A paho client with its own reader.

    Messages that were read together are acknowledged together. A packet without properties needs no
    tables of properties, and no packet is copied while it is written.

    Attributes:
        on_plain_message: receives topic, payload, and whether the message was retained.
        reasons: the codes of the newest CONNACK, SUBACK or DISCONNECT, for the callbacks of paho.
            `on_publish` receives the code of a PUBACK instead of paho's object.
        read_error: the error that ended the newest unreadable connection; None if there was none.
    """

    on_plain_message: Callable[[str, bytes, bool], None]
    reasons: tuple[int, ...]
    read_error: OSError | None

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        # Grows to the length of the packet that it begins with.
        self._buffer = bytearray(_READ_BYTES)
        self._filled = 0
        self._acknowledgements = bytearray()
        self.reasons = ()
        self.read_error = None

    def loop_read(self, max_packets: int = 1) -> MQTTErrorCode:
        """Receive what has arrived, and acknowledge it."""
        result = self._process_arrived(max(max_packets, _READS_AT_ONCE))
        if result > 0 or self._sock is None:
            return self._loop_rc_handle(result)
        with self._msgtime_mutex:
            self._last_bytes_received = time.monotonic()
        if not self._acknowledgements:
            return MQTTErrorCode.MQTT_ERR_SUCCESS
        self._queue_acknowledgements()
        # Written here, so that paho's thread need not be woken up for it.
        return self.loop_write()

    def _process_arrived(self, reads: int) -> MQTTErrorCode:
        """Read at most so many times, and process the packets that have arrived."""
        result = MQTTErrorCode.MQTT_ERR_SUCCESS
        count = 0
        room = 0
        for _ in range(reads):
            connection: Any = self._sock
            if connection is None or result > 0:
                break
            # A read that did not fill the buffer has emptied the connection, except that TLS may
            # hold decrypted bytes back.
            if count < room and not getattr(connection, "pending", int)():
                break
            room = len(self._buffer) - self._filled
            try:
                count = connection.recv_into(memoryview(self._buffer)[self._filled :])
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            except OSError as error:
                self.read_error = error
                count = 0
            self._filled += count
            result = self._process_packets() if count else MQTTErrorCode.MQTT_ERR_CONN_LOST
        return result

    def _packet_write(self) -> MQTTErrorCode:
        """Send what is queued; on a connection that has ended, receive what arrived before.

        A broker may refuse a message and end the connection while something else is being sent.
        Without its answer, that message would be sent again on every later connection, which the
        broker would end as well.
        """
        result = super()._packet_write()
        if result != MQTTErrorCode.MQTT_ERR_CONN_LOST:
            return result
        self._process_arrived(_READS_AFTER_THE_END)
        # The broker's reason has closed the connection.
        return MQTTErrorCode.MQTT_ERR_SUCCESS if self._sock is None else result

    def close_wakeup_sockets(self) -> None:
        """Close the pair of sockets that wakes paho's thread.

        Otherwise the garbage collector would close them, and warn of open sockets.
        """
        self._reset_sockets(sockpair_only=True)

    def _queue_acknowledgements(self) -> None:
        """Queue all acknowledgements as one packet of paho's."""
        packet: Any = {
            "command": _ACKNOWLEDGEMENT,
            "mid": 0,
            "qos": 1,
            "pos": 0,
            "info": None,
            "packet": self._acknowledgements,
            "to_process": len(self._acknowledgements),
        }
        self._out_packet.append(packet)
        self._acknowledgements = bytearray()

    def _process_packets(self) -> MQTTErrorCode:
        """Process the complete packets, and make room for the remainder of the next one."""
        buffer = self._buffer
        view = memoryview(buffer)
        start = 0
        try:
            body, end = _packet_extent(buffer, start, self._filled)
            while end <= self._filled:
                result = self._process_packet(buffer[start], view[body:end])
                if result > 0 or self._sock is None:
                    return result
                start = end
                body, end = _packet_extent(buffer, start, self._filled)
        except MalformedPacket:
            return MQTTErrorCode.MQTT_ERR_PROTOCOL
        if not start and end <= len(buffer):
            # The packet fits. A copy for each piece of a large packet would take quadratic time.
            return MQTTErrorCode.MQTT_ERR_SUCCESS
        incomplete = buffer[start : self._filled]
        self._buffer = bytearray(max(end - start, _READ_BYTES))
        self._filled = len(incomplete)
        self._buffer[: len(incomplete)] = incomplete
        return MQTTErrorCode.MQTT_ERR_SUCCESS

    def _process_packet(self, command: int, body: memoryview) -> MQTTErrorCode:
        """Process one packet here if it is of the two common kinds, otherwise in paho."""
        if command & _PUBLISH_FLAGS == _PUBLISH_OF_QOS_1 and self._receive_plain(command, body):
            return MQTTErrorCode.MQTT_ERR_SUCCESS
        if command == _ACKNOWLEDGEMENT and len(body) >= 2:
            reason = body[2] if len(body) > 2 else 0
            return self._finish_message(int.from_bytes(body[:2], "big"), reason)
        packet = bytearray(body)
        if command >> 4 == PacketTypes.CONNACK and len(body) == 2:
            packet.append(0)  # no properties: a broker of MQTT 3.1.1 answers without their length
        places = _reason_places(command >> 4, packet)
        self.reasons = tuple(packet[place] for place in places)
        for place in places:
            if not _is_known_to_paho(command >> 4, packet[place]):
                packet[place] = _FIRST_FAILURE
        self._in_packet |= {
            "command": command,
            "remaining_length": len(body),
            "packet": packet,
            "pos": 0,
        }
        return self._packet_handle()

    def _receive_plain(self, command: int, body: memoryview) -> bool:
        """Receive a message without properties; return False if it has some."""
        topic_end = 2 + int.from_bytes(body[:2], "big")
        payload_start = topic_end + 3  # after the packet's identifier and an empty property list
        if len(body) < payload_start or body[topic_end + 2]:
            return False
        topic = str(body[2:topic_end], errors="replace")
        self.on_plain_message(topic, bytes(body[payload_start:]), bool(command & 1))
        identifier = bytes(body[topic_end : topic_end + 2])
        # Only now: if its receiver could not process the message, the broker sends it again.
        self._acknowledgements += struct.pack("!BB2s", _ACKNOWLEDGEMENT, 2, identifier)
        return True

    def _finish_message(self, identifier: int, reason: Any) -> MQTTErrorCode:
        """Finish a message that the broker has acknowledged, or refused with a reason code."""
        with self._out_message_mutex:
            if identifier not in self._out_messages:
                return MQTTErrorCode.MQTT_ERR_SUCCESS
            return self._do_on_publish(identifier, reason, _NO_PROPERTIES)

    def forget_messages(self, identifiers: Iterable[int]) -> None:
        """Forget messages that are not acknowledged, so that they are not sent again."""
        with self._out_message_mutex:
            for identifier in identifiers:
                message = self._out_messages.pop(identifier, None)
                if message is not None and message.state == paho.mqtt_ms_wait_for_puback:
                    self._inflight_messages -= 1

    def _loop(self, timeout: float = 1.0) -> MQTTErrorCode:
        """Run paho's loop; an error of a message's receiver ends the connection, not the thread."""
        try:
            return super()._loop(timeout)
        except Exception:  # noqa: BLE001  (nobody would start the thread again)
            _LOG.exception("the connection to the broker failed; connecting again")
            return self._loop_rc_handle(MQTTErrorCode.MQTT_ERR_UNKNOWN)

    def _packet_queue(
        self,
        command: int,
        packet: Any,
        *about: Any,
    ) -> MQTTErrorCode:
        """Queue a packet as a view: paho slices it for each write, which would copy bytes."""
        view: Any = memoryview(packet)
        return super()._packet_queue(command, view, *about)

    def _sock_close(self) -> None:
        """Close the connection, and forget a partially received packet."""
        self._filled = 0
        self._acknowledgements = bytearray()
        super()._sock_close()


def _packet_extent(
    buffer: bytearray,
    start: int,
    filled: int,
) -> tuple[int, int]:
    """Return where the body of a packet begins and ends.

    Until the length of the packet has arrived, the end is beyond `filled`.

    Raises:
        MalformedPacket: the length has more than four bytes.
    """
    size = 0
    for position in range(start + 1, min(start + 5, filled)):
        digit = position - start - 1
        size |= (buffer[position] & 127) << 7 * digit
        if buffer[position] < 128:
            body = position + 1
            return body, body + size
    if filled < start + 5:
        return filled, filled + 1
    raise MalformedPacket("the length field of a packet does not end")


def _reason_places(packet_type: int, packet: bytearray) -> tuple[int, ...]:
    """Return where the reason codes of a packet are, for the types that paho decodes."""
    if packet_type == PacketTypes.CONNACK:
        return (1,) if len(packet) > 1 else ()
    if packet_type == PacketTypes.DISCONNECT:
        return (0,) if packet else ()
    if packet_type == PacketTypes.SUBACK and len(packet) > 2:
        _properties, end = _packet_extent(packet, 1, len(packet))
        return tuple(range(end, len(packet)))
    return ()


def _is_known_to_paho(packet_type: int, code: int) -> bool:
    packet_types: set[int] = set()
    for types in _PAHO_REASONS.get(code, {}).values():
        packet_types.update(types)
    return packet_type in packet_types
