"""Keeps the time for which an agent's broker is away, and writes what its link reports to the log.

Lines that repeat themselves are folded: a board whose connections end as soon as they are made must
not fill its log.
"""

import logging

from device_runtime.agent.journal import Journal
from fleet_protocol.folded_lines import FoldedLines
from fleet_protocol.transport import Connected, Disconnected


class ConnectionLog:
    """The connection of an agent, as far as its link has reported.

    Args:
        journal: the log of the device.

    Attributes:
        gone_since: ``time.monotonic()`` of the loss of the connection; None while there is one.
        greeted: whether there has been a connection before.
    """

    def __init__(self, journal: Journal) -> None:
        self.gone_since: float | None = None
        self.greeted = False

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

    def regain(self, event: Connected, now: float) -> float:
        """Note a connection; return for how many seconds there was none."""
        session = "kept" if event.session_present else "new"
        self._lines.info("connected", f"connected, session {session}")
        if self.gone_since is None:
            return 0.0
        away_seconds = now - self.gone_since
        self.gone_since = None
        return away_seconds
