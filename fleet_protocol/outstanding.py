"""The messages of a link that its broker has not acknowledged, and the packets that it refuses.

A broker announces the largest packet that it accepts when a client connects, or refuses a packet in
its acknowledgement, or ends the connection. In each case the packet is not sent again.
"""

import sys
import threading
from dataclasses import dataclass

from fleet_protocol.refusals import FIRST_FAILURE, PACKET_TOO_LARGE, TOPIC_REFUSED
from fleet_protocol.transport import Refused

# Number of connections that end one after the other, each with the same packet in transit, after
# which the broker counts as refusing the packet: some end the connection without a reason.
_SUSPICIOUS_LOSSES = 3
_SMALL_BYTES = 4096  # packets that no broker refuses for their size


@dataclass(frozen=True)
class SentPacket:
    """A message in transit.

    Attributes:
        topic: topic of the message.
        size: bytes of its packet.
    """

    topic: str
    size: int

    def refused(self, code: int) -> Refused:
        """Return the event of its refusal."""
        return Refused(self.topic, code, self.size)


class Outstanding:
    """Guards the state that the owner's thread and the network's thread share.

    Attributes:
        changed: notified when a message is acknowledged, or the connection changes.
        packet_bytes: size of the largest packet that the broker accepts, as far as is known.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.packet_bytes = sys.maxsize
        self._packets: dict[int, SentPacket] = {}  # by the id of their messages
        # Packets that are being passed on. They have no id yet, but may be refused already, because
        # the network's thread sends them before the owner's thread goes on.
        self._passing: list[SentPacket] = []
        # Reasons of messages that were acknowledged before `add` was called for them.
        self._early: dict[int, int] = {}
        self._suspect: int | None = None  # id of the largest message at the last loss
        self._losses = 0

    def __len__(self) -> int:
        return len(self._packets)

    def begin(self, packet: SentPacket) -> None:
        """Record a message that is about to be passed on."""
        with self.changed:
            self._passing.append(packet)

    def cancel(self, packet: SentPacket) -> None:
        """Forget a message that could not be passed on."""
        with self.changed:
            self._passing.remove(packet)

    def add(self, message: int, packet: SentPacket) -> dict[int, Refused]:
        """Record the id of a message that was passed on.

        Args:
            message: its id.
            packet: the packet with which `begin` was called.

        Returns:
            The refusals of messages that have arrived already, by their ids; they are dropped.
        """
        with self.changed:
            self._passing.remove(packet)
            if message in self._early:
                self._packets[message] = packet
                return self._finish(message, self._early.pop(message))
            if packet.size > self.packet_bytes:
                # Meanwhile the broker has ended the connection for this packet or a smaller one.
                return {message: packet.refused(PACKET_TOO_LARGE)}
            self._packets[message] = packet
            return {}

    def acknowledge(self, message: int, code: int) -> dict[int, Refused]:
        """Record the acknowledgement of a message.

        Returns:
            The messages that are dropped if it is a refusal, by their ids.
        """
        with self.changed:
            if message not in self._packets:
                self._early[message] = code
                return {}
            return self._finish(message, code)

    def _finish(self, message: int, code: int) -> dict[int, Refused]:
        if message == self._suspect:
            self._suspect = None
        if code == PACKET_TOO_LARGE:
            return self._drop_large(self._packets[message].size)
        packet = self._packets.pop(message)
        self.changed.notify_all()
        if code < FIRST_FAILURE:
            return {}
        dropped = {message: packet.refused(code)}
        if code in TOPIC_REFUSED:
            dropped |= self._drop_topic(packet.topic, code)
        return dropped

    def _drop_topic(self, topic: str, code: int) -> dict[int, Refused]:
        """Drop the other messages on a refused topic, because they would be refused, too."""
        dropped: dict[int, Refused] = {}
        for message, packet in list(self._packets.items()):
            if packet.topic == topic:
                del self._packets[message]
                dropped[message] = packet.refused(code)
        return dropped

    def _drop_large(self, size: int) -> dict[int, Refused]:
        """Drop all messages of at least this many bytes, because they would be refused, too."""
        self.packet_bytes = min(self.packet_bytes, size - 1)
        dropped: dict[int, Refused] = {}
        for message, packet in list(self._packets.items()):
            if packet.size >= size:
                del self._packets[message]
                dropped[message] = packet.refused(PACKET_TOO_LARGE)
        self.changed.notify_all()
        return dropped

    def note_limit(self, announced: int) -> None:
        """Record the size that the broker announces with a connection."""
        with self.changed:
            self.packet_bytes = min(self.packet_bytes, announced)

    def drop_refused(self, code: int | None) -> dict[int, Refused]:
        """Drop the messages for which a connection was ended, and return them by their ids.

        Args:
            code: why the broker ended the connection; None if it gave no reason.
        """
        with self.changed:
            if code == PACKET_TOO_LARGE:
                size = self._largest_size()
                return self._drop_large(size) if size else {}
            largest = self._largest()
            if largest is None or code is not None or not self._is_suspicious(largest):
                return {}
            self._suspect = None
            return self._drop_large(self._packets[largest].size)

    def _largest_size(self) -> int:
        """Return the bytes of the largest packet that a broker may refuse; 0 if there is none."""
        size = 0
        for packet in (*self._packets.values(), *self._passing):
            if packet.size > max(size, _SMALL_BYTES):
                size = packet.size
        return size

    def _largest(self) -> int | None:
        """Return the id of the largest message that some broker may refuse for its size."""
        largest = None
        size = _SMALL_BYTES
        for message, packet in self._packets.items():
            if packet.size > size:
                largest = message
                size = packet.size
        return largest

    def _is_suspicious(self, message: int) -> bool:
        """Return whether too many connections ended while a message was in transit."""
        self._losses = self._losses + 1 if message == self._suspect else 1
        self._suspect = message
        return self._losses >= _SUSPICIOUS_LOSSES
