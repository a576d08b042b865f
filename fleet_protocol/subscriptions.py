"""The subscriptions of a link, and the broker's answers."""

import threading
from collections.abc import Callable

from fleet_protocol.refusals import FIRST_FAILURE
from fleet_protocol.transport import Refused

_PENDING = -1


class Subscriptions:
    """The topic filters of a client, which are subscribed to again with every connection.

    Args:
        changed: locks this state, and is notified of answers.
        request: sends a subscription with its quality of service; returns the id of its packet, or
            None without a connection.
    """

    def __init__(
        self, changed: threading.Condition, request: Callable[[str, int], int | None]
    ) -> None:
        self._changed = changed
        self._request = request
        self._filters: dict[str, int] = {}  # with their quality of service
        self._under_way: dict[int, str] = {}  # filters by the id of the packet
        self._awaited: dict[str, int] = {}  # reason codes of filters that the owner waits for

    def renew(self) -> None:
        """Subscribe to all filters with a new connection.

        This includes sessions that the broker knows: after a crash it may have restored an older
        state.
        """
        with self._changed:
            self._under_way.clear()
            for topic_filter in self._filters:
                self._send(topic_filter)

    def add(
        self,
        topic_filter: str,
        qos: int,
        timeout_seconds: float,
        is_lost: Callable[[], bool],
    ) -> int | None:
        """Subscribe to a filter, and wait for the answer.

        Args:
            topic_filter: filter of the topics.
            qos: quality of service.
            timeout_seconds: longest wait; with 0 there is none.
            is_lost: whether the connection is lost, so that no answer can arrive.

        Returns:
            The reason code of the answer; None if none arrived while there was a connection, and 0
            without waiting.
        """
        with self._changed:
            self._filters[topic_filter] = qos
            if not self._send(topic_filter) or not timeout_seconds:
                return 0
            self._awaited[topic_filter] = _PENDING
            self._changed.wait_for(
                lambda: self._awaited[topic_filter] != _PENDING or is_lost(), timeout_seconds
            )
            code = self._awaited.pop(topic_filter)
            if code != _PENDING:
                return code
            return 0 if is_lost() else None

    def remove(self, topic_filter: str) -> None:
        """Forget a filter."""
        with self._changed:
            self._filters.pop(topic_filter, None)

    def answer(self, packet: int, code: int) -> tuple[Refused, ...]:
        """Record the answer to a subscription.

        Returns: The refusal of a subscription whose answer nothing waits for; nothing otherwise.
        """
        with self._changed:
            topic_filter = self._under_way.pop(packet, None)
            if topic_filter is None:
                return ()
            if topic_filter in self._awaited:
                self._awaited[topic_filter] = code
                self._changed.notify_all()
                return ()
        return (Refused(topic_filter, code),) if code >= FIRST_FAILURE else ()

    def _send(self, topic_filter: str) -> bool:
        # The lock is held, so that no answer arrives before the request is recorded.
        packet = self._request(topic_filter, self._filters[topic_filter])
        if packet is None:
            return False
        self._under_way[packet] = topic_filter
        return True
