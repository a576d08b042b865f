"""Tracks how long an agent's broker is unreachable, and logs what its link reports.

Repeated lines are folded into one: a board whose connections end immediately must not fill its log.
"""

import logging
from collections import deque
from shlex import quote

from device_runtime.agent.journal import Journal
from fleet_protocol.folded_lines import FoldedLines
from fleet_protocol.refusals import explain
from fleet_protocol.transport import Connected, Disconnected, LoginRefused

# If so many connections are lost within so many seconds, something ends them as soon as they are
# made.
_LOSSES = 5
_LOSSES_SECONDS = 60.0


class ConnectionLog:
    """The state of an agent's connection, as far as its link has reported it.

    Args:
        journal: the log of the device.
        device: its id.

    Attributes:
        gone_since: ``time.monotonic()`` at which the connection was lost; None while connected.
        greeted: whether the agent has been connected before.
        is_refused: whether the broker refuses the login of this device.
    """

    def __init__(self, journal: Journal, device: str) -> None:
        self._device = device
        self._losses: deque[float] = deque(maxlen=_LOSSES)
        self.gone_since: float | None = None
        self.greeted = False
        self.is_refused = False

        def write(level: int, line: str) -> None:
            if level == logging.INFO:
                journal.info(line)
            else:
                journal.warning(line)

        self._lines = FoldedLines(write)

    def lose(self, event: Disconnected, now: float) -> None:
        """Record that the connection was lost."""
        if self.gone_since is None:
            self.gone_since = now
        self._lines.warning(
            f"lost {event.reason}", f"connection lost ({event.reason}); trying again"
        )
        if event.code is not None:
            return  # the broker has given the reason
        self._losses.append(now)
        if len(self._losses) == _LOSSES and now - self._losses[0] < _LOSSES_SECONDS:
            self._lines.warning(
                "twin",
                "connections end as soon as they are established: if another agent also runs as"
                f" {self._device!r}, give one of them another name",
            )

    def note_refusal(self, event: LoginRefused) -> None:
        """Record that the broker refuses the login; the link then retries less often."""
        self.is_refused = True
        self._lines.warning(
            "refused",
            f"the broker no longer accepts this board's login {explain(event.code)}. If its "
            "enrolment was revoked or replaced, put the file of a new `shoal enroll "
            f"{quote(self._device)}` in its place, and the board continues with it. Until "
            "then the board retries about once an hour",
        )

    def regain(self, event: Connected, now: float) -> float:
        """Record a connection; return how many seconds the board was disconnected before."""
        self.is_refused = False
        session = "kept" if event.session_present else "new"
        self._lines.info("connected", f"connected, session {session}")
        if self.gone_since is None:
            return 0.0
        away_seconds = now - self.gone_since
        self.gone_since = None
        return away_seconds
