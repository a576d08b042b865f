"""The messages of a link that its broker has not acknowledged, and the packets it does not take.

A broker names the largest packet that it takes when a client connects, or refuses a packet in its
acknowledgement, or ends the connection. Whichever it does, the packet is not sent again.
"""

import sys
import threading
from dataclasses import dataclass

from fleet_protocol.refusals import FIRST_FAILURE, PACKET_TOO_LARGE
from fleet_protocol.transport import Refused

# Connections that end one after the other, each while the same packet is under way, after which the
# broker counts as refusing the packet: some end the connection without a reason.
_SUSPICIOUS_LOSSES = 3
_SMALL_BYTES = 4096  # packets that no broker takes for too large


@dataclass(frozen=True)
class SentPacket:
    """A message under way.

    Attributes:
        topic: of the message.
        size: bytes of its packet.
    """

    topic: str
    size: int

    def refused(self, code: int) -> Refused:
        """Return the event of its refusal."""
        return Refused(self.topic, code, self.size)


class Outstanding:
    """Guards what the owner's thread and the thread of the network share.

    Attributes:
        changed: notified when a message is acknowledged, or the connection changes.
        packet_bytes: size of the largest packet that the broker takes, as far as is known.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.packet_bytes = sys.maxsize
        self._packets: dict[int, SentPacket] = {}  # by the id of their messages
        # Reasons of messages that were acknowledged before `add` was called for them.
        self._early: dict[int, int] = {}
        self._suspect: int | None = None  # id of the largest message at the last loss
        self._losses = 0

    def __len__(self) -> int:
        return len(self._packets)

    def add(self, message: int, packet: SentPacket) -> dict[int, Refused]:
        """Note a message that was handed over; return its refusal if that has come already."""
        with self.changed:
            self._packets[message] = packet
            if message not in self._early:
                return {}
            return self._finish(message, self._early.pop(message))

    def acknowledge(self, message: int, code: int) -> dict[int, Refused]:
        """Note the acknowledgement of a message.

        Returns:
            The messages that are dropped because it is a refusal, by their ids.
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
        return {message: packet.refused(code)} if code >= FIRST_FAILURE else {}

    def _drop_large(self, size: int) -> dict[int, Refused]:
        """Drop all messages of so many bytes or more: they would be refused, too."""
        self.packet_bytes = min(self.packet_bytes, size - 1)
        dropped: dict[int, Refused] = {}
        for message, packet in list(self._packets.items()):
            if packet.size >= size:
                del self._packets[message]
                dropped[message] = packet.refused(PACKET_TOO_LARGE)
        self.changed.notify_all()
        return dropped

    def note_limit(self, announced: int) -> None:
        """Note the size that the broker announces with a connection."""
        with self.changed:
            self.packet_bytes = min(self.packet_bytes, announced)

    def drop_refused(self, code: int | None) -> dict[int, Refused]:
        """Drop the messages for which a connection was ended, and return them by their ids.

        Args:
            code: why the broker ended the connection; None if it gave no reason.
        """
        with self.changed:
            largest = self._largest()
            if largest is None or not self._is_to_blame(largest, code):
                return {}
            self._suspect = None
            return self._drop_large(self._packets[largest].size)

    def _largest(self) -> int | None:
        """Return the id of the largest message that some broker may take for too large."""
        largest = None
        size = _SMALL_BYTES
        for message, packet in self._packets.items():
            if packet.size > size:
                largest = message
                size = packet.size
        return largest

    def _is_to_blame(self, message: int, code: int | None) -> bool:
        """Return whether a connection was ended because of a message."""
        if code is not None:
            return code == PACKET_TOO_LARGE
        self._losses = self._losses + 1 if message == self._suspect else 1
        self._suspect = message
        return self._losses >= _SUSPICIOUS_LOSSES
