"""The attempts of a link to connect: why one failed, and how long the link waits for the next.

The network's thread reports what happens to a connection. The owner's thread waits until there is
the first one, or until the broker refuses the client.
"""

import queue
import threading
import time
from collections.abc import Callable

from fleet_protocol.backoff import Backoff
from fleet_protocol.errors import BrokerRefusedError, TransportError
from fleet_protocol.folded_lines import FoldedLines
from fleet_protocol.refusals import (
    CERTIFICATE_REFUSED,
    ENDED_EARLY,
    Reaction,
    explain,
    is_certificate_alert,
    is_refused_certificate,
    refusal_of_code,
    why_not_reached,
)
from fleet_protocol.transport import BrokerAddress, Event, LoginRefused


class Attempts:
    """The state of a client's connection, and the waits between its attempts.

    Args:
        address: address of the broker.
        changed: locks this state, and is notified when it changes.
        inbox: takes the event of a refused login.
        lines: where a later failure is logged.
        wait: sets how many seconds pass before the next attempt.

    Attributes:
        connected: whether the broker is connected now.
    """

    def __init__(
        self,
        address: BrokerAddress,
        changed: threading.Condition,
        inbox: queue.SimpleQueue[Event],
        *,
        lines: FoldedLines,
        wait: Callable[[float], None],
    ) -> None:
        self.connected = False
        self._address = address
        self._changed = changed
        self._inbox = inbox
        self._lines = lines
        self._wait = wait
        self._backoff = Backoff()
        self._was_connected = False
        self._failure = "no answer"
        self._is_answered = False  # this attempt, whatever the answer
        self._refused_for: int | None = None  # why the broker refuses this client

    # Methods that the network's thread calls.

    def begin(self) -> None:
        """Record that an attempt begins."""
        self._is_answered = False

    def note_connection(self) -> None:
        """Record that the broker accepts this client."""
        self._is_answered = True
        self._backoff.note_connection(time.monotonic())
        with self._changed:
            self.connected = True
            self._was_connected = True
            self._failure = ""
            self._refused_for = None
            self._changed.notify_all()

    def note_refused_login(self, code: int) -> None:
        """Record that the broker refuses this client, which then retries less and less often."""
        self._is_answered = True
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

    def note_error(self, error: BaseException | None) -> None:
        """Record the error that prevented a connection."""
        if is_certificate_alert(error):
            self.note_refused_login(CERTIFICATE_REFUSED)
            return
        self._note_failure(why_not_reached(error))
        refused = is_refused_certificate(error)
        self._wait(self._backoff.wait_refused() if refused else self._backoff.wait_unreached())

    def note_end(self) -> bool:
        """Record that the network's connection ended; return whether the broker had accepted it."""
        with self._changed:
            was_connected = self.connected
            self.connected = False
            self._changed.notify_all()
        return was_connected

    def note_end_of_attempt(self, error: BaseException | None) -> None:
        """Record that a connection ended before the broker accepted it.

        Args:
            error: error of the last read from the network; None if there was none.
        """
        # A refused connection was recorded before.
        if is_certificate_alert(error):
            self.note_refused_login(CERTIFICATE_REFUSED)
        elif not self._is_answered:
            self._note_failure(ENDED_EARLY)
            self._wait(self._backoff.wait_lost(time.monotonic()))

    def wait_lost(self, code: int | None, *, forgiven: bool) -> None:
        """Wait before the next attempt after an accepted connection ended.

        Args:
            code: why the broker ended it; None if it gave no reason.
            forgiven: whether the cause of the loss is gone.
        """
        if forgiven:
            self._backoff.forgive()
        delay = self._backoff.wait_lost(time.monotonic())
        if code and refusal_of_code(code).connection is Reaction.STOP:
            delay = self._backoff.wait_refused()
        self._wait(delay)

    def _note_failure(self, why: str) -> None:
        """Record what prevents a connection.

        `await_first` reports it for the first connection. For a later one it is logged, because
        nothing else reports it.
        """
        with self._changed:
            if self._was_connected and why != self._failure:
                self._lines.warning(
                    why, f"no connection to the broker at {self._address}: {why}; trying again"
                )
            self._failure = why
            self._changed.notify_all()

    # A method that the owner calls.

    def await_first(self, timeout_seconds: float) -> None:
        """Wait for the first connection.

        Raises:
            BrokerRefusedError: the broker refuses this client.
            TransportError: there is no connection in time.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self.connected or self._refused_for is not None, timeout_seconds
            )
            if self.connected:
                return
            refused_for = self._refused_for
            failure = self._failure
        if refused_for is not None:
            raise BrokerRefusedError(
                refused_for, f"cannot connect to the broker at {self._address}: {failure}"
            )
        raise TransportError(
            f"cannot connect to the broker at {self._address} within {timeout_seconds:g} s: "
            f"{failure}. Is it running, and are host and port correct?"
        )
