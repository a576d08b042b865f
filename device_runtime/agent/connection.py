"""Keeps the time for which an agent's broker is away, and writes what its link reports to the log.

Lines that repeat themselves are folded: a board whose connections end as soon as they are made must
not fill its log.
"""

import logging
from collections import deque
from shlex import quote

from device_runtime.agent.journal import Journal
from fleet_protocol.folded_lines import FoldedLines
from fleet_protocol.refusals import explain
from fleet_protocol.transport import Connected, Disconnected, LoginRefused

# So many losses in so short a time: something ends connections as soon as they are made.
_LOSSES = 5
_LOSSES_SECONDS = 60.0


class ConnectionLog:
    """The connection of an agent, as far as its link has reported.

    Args:
        journal: the log of the device.
        device: its id.

    Attributes:
        gone_since: ``time.monotonic()`` of the loss of the connection; None while there is one.
        greeted: whether there has been a connection before.
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
        """Note a loss."""
        if self.gone_since is None:
            self.gone_since = now
        self._lines.warning(
            f"lost {event.reason}", f"connection lost ({event.reason}); trying again"
        )
        if event.code is not None:
            return  # the broker has named the reason
        self._losses.append(now)
        if len(self._losses) == _LOSSES and now - self._losses[0] < _LOSSES_SECONDS:
            self._lines.warning(
                "twin",
                "connections end as soon as they are made: if another agent runs as "
                f"{self._device!r}, give it another name",
            )

    def note_refusal(self, event: LoginRefused) -> None:
        """Note that the broker refuses the login, for which the link asks seldom."""
        self.is_refused = True
        self._lines.warning(
            "refused",
            f"the broker lets this board in no more {explain(event.code)}. If its enrolment was "
            f"revoked or replaced, put the file of a new `shoal enroll {quote(self._device)}` in "
            "its place: the board goes on with it. Otherwise it asks about once an hour",
        )

    def regain(self, event: Connected, now: float) -> float:
        """Note a connection; return for how many seconds there was none."""
        self.is_refused = False
        session = "kept" if event.session_present else "new"
        self._lines.info("connected", f"connected, session {session}")
        if self.gone_since is None:
            return 0.0
        away_seconds = now - self.gone_since
        self.gone_since = None
        return away_seconds
