"""Queues the server's events, bounded in bytes.

The network's thread waits a moment when the inbox is full, so that the connection itself holds the
senders back, and messages wait in the broker. If the server is busy with something else for longer,
large messages are dropped: chunks, which are asked for again.
"""

import queue
import threading
from typing import Any

from typing_extensions import override

from fleet_protocol.transport import Received

LIMIT_BYTES = 20 * 1024 * 1024
_PATIENCE_SECONDS = 5.0  # a quarter of the keep-alive: the thread also keeps the connection
_SMALL_BYTES = 4096  # control messages are smaller, chunks larger


class Inbox(queue.SimpleQueue[Any]):
    """A queue of events; one thread puts, another gets.

    A thread that puts a large message into a full inbox waits for room, then drops the message.
    Small messages may fill the limit once more: control messages get through a flood of chunks.

    Args:
        limit_bytes: the most payload bytes of large messages that wait.
        patience_seconds: how long a thread that puts a message waits for room.

    Attributes:
        dropped: messages that found no room.
    """

    def __init__(
        self,
        limit_bytes: int = LIMIT_BYTES,
        patience_seconds: float = _PATIENCE_SECONDS,
    ) -> None:
        super().__init__()
        self._limit = limit_bytes
        self._patience_seconds = patience_seconds
        # Each count is written by one thread alone, so that neither needs a lock.
        self._put_bytes = 0
        self._taken_bytes = 0
        self._room = threading.Event()
        self._patient = True
        self.dropped = 0

    @property
    def waiting_bytes(self) -> int:
        """Return the payload bytes that wait."""
        return self._put_bytes - self._taken_bytes

    @override
    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if isinstance(item, Received):
            size = len(item.payload)
            if not self._has_room(size):
                self.dropped += 1
                return
            self._put_bytes += size
        super().put(item)

    def _has_room(self, size: int) -> bool:
        limit = self._limit if size > _SMALL_BYTES else 2 * self._limit
        if self.waiting_bytes + size <= limit:
            return True
        if self._patient:
            # Cleared before the second look: room that is made in between sets it again.
            self._room.clear()
            if self.waiting_bytes + size > limit:
                self._room.wait(self._patience_seconds)
            # After a wait in vain, none until there is room: the thread also keeps the connection.
            self._patient = self.waiting_bytes + size <= limit
        return self.waiting_bytes + size <= limit

    @override
    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        event = super().get(block, timeout)
        if isinstance(event, Received):
            self._taken_bytes += len(event.payload)
            if self.waiting_bytes <= self._limit // 2:
                self._patient = True
                self._room.set()
        return event

    @override
    def get_nowait(self) -> Any:
        return self.get(block=False)
