"""Queues the server's events, bounded in bytes.

The network's thread waits a moment when the inbox is full, so that the connection itself slows the
senders down, and messages wait in the broker. If the server is busy with other work for longer,
large messages are dropped: these are chunks, which are requested again.
"""

import queue
import threading
from typing import Any

from typing_extensions import override

from fleet_protocol.transport import Received

LIMIT_BYTES = 20 * 1024 * 1024
_PATIENCE_SECONDS = 5.0  # a quarter of the keep-alive: the thread also maintains the connection
_SMALL_BYTES = 4096  # control messages are smaller, chunks larger


class Inbox(queue.SimpleQueue[Any]):
    """A queue of events; one thread puts, another gets.

    A thread that puts a large message into a full inbox waits for space, then drops the message.
    Small messages may use the limit a second time, so that control messages get through a flood of
    chunks.

    Args:
        limit_bytes: most payload bytes of large messages in the queue.
        patience_seconds: how long a thread that puts a message waits for space.

    Attributes:
        dropped: number of messages that found no space.
    """

    def __init__(
        self,
        limit_bytes: int = LIMIT_BYTES,
        patience_seconds: float = _PATIENCE_SECONDS,
    ) -> None:
        super().__init__()
        self._limit = limit_bytes
        self._patience_seconds = patience_seconds
        # Only one thread writes each count, so that neither needs a lock.
        self._put_bytes = 0
        self._taken_bytes = 0
        self._room = threading.Event()
        self._patient = True
        self.dropped = 0

    @property
    def waiting_bytes(self) -> int:
        """Return the payload bytes in the queue."""
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
            # Cleared before the second check: space that is freed in between sets it again.
            self._room.clear()
            if self.waiting_bytes + size > limit:
                self._room.wait(self._patience_seconds)
            # After one wait without success, no further waits until there is space: the thread also
            # maintains the connection.
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
