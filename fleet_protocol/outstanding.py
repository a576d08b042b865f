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

    def add(self, message: int, packet: SentPacket) -> Refused | None:
        """Note a message that was handed over; return its refusal if that has come already."""
        with self.changed:
            if message not in self._early:
                self._packets[message] = packet
                return None
            code = self._early.pop(message)
            return self._refusal(packet, code)

    def acknowledge(self, message: int, code: int) -> Refused | None:
        """Note the acknowledgement of a message; return its refusal, if it is one."""
        with self.changed:
            packet = self._packets.pop(message, None)
            if packet is None:
                self._early[message] = code
                return None
            if message == self._suspect:
                self._suspect = None
            self.changed.notify_all()
            return self._refusal(packet, code)

    def _refusal(self, packet: SentPacket, code: int) -> Refused | None:
        if code < FIRST_FAILURE:
            return None
        if code == PACKET_TOO_LARGE:
            self.packet_bytes = min(self.packet_bytes, packet.size - 1)
        return packet.refused(code)

    def note_limit(self, announced: int) -> None:
        """Note the size that the broker announces with a connection."""
        with self.changed:
            self.packet_bytes = min(self.packet_bytes, announced)

    def drop_refused(self, code: int | None) -> dict[int, SentPacket]:
        """Drop the messages for which a connection was ended, and return them.

        Args:
            code: why the broker ended the connection; None if it gave no reason.
        """
        with self.changed:
            largest = self._largest()
            if largest is None or not self._is_to_blame(largest, code):
                return {}
            self._suspect = None
            # All that are as large would end the next connections.
            limit = self._packets[largest].size
            self.packet_bytes = min(self.packet_bytes, limit - 1)
            dropped: dict[int, SentPacket] = {}
            for message, packet in list(self._packets.items()):
                if packet.size >= limit:
                    dropped[message] = self._packets.pop(message)
            self.changed.notify_all()
            return dropped

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
