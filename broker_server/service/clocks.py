"""Logs the boards whose clock is far from the server's, from what they say as they accept a task.

A board answers after its offer and before the server reads the answer, so how long either was on
the way does not matter.
"""

import logging
import time

from broker_server.rounds.reporting import Reporter

EVENT = "clock-off"
"""Kind of the log lines."""

_MOST_SECONDS = 3600.0  # summer time on a clock that should show UTC is tolerated
_SECONDS_OF = {"days": 86_400, "hours": 3600}
_LOG = logging.getLogger(__name__)


class Clocks:
    """Logs each board once in a run."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._noted: set[str] = set()

    def check(self, device: str, number: int, clock: float | None, offered: float) -> None:
        """Compare the clock of a board with the server's.

        Args:
            device: the board.
            number: number of the round.
            clock: what the board's clock showed as it answered, in seconds since 1970; None if the
                board does not say.
            offered: ``time.monotonic()`` of the offer.
        """
        if clock is None or device in self._noted:
            return
        now = time.time()
        asked = now - max(0.0, time.monotonic() - offered)
        if clock < asked - _MOST_SECONDS:
            difference = f"{_span(asked - clock)} behind"
        elif clock > now + _MOST_SECONDS:
            difference = f"{_span(clock - now)} ahead of"
        else:
            return
        self._noted.add(device)
        why = (
            f"its clock is {difference} the server's; synchronise the clock that is wrong "
            "(timedatectl set-ntp true): quiet hours and the ends of enrolments depend on it"
        )
        _LOG.warning("%s: %s", device, why)
        self._reporter.note(EVENT, why, number, device)


def _span(seconds: float) -> str:
    """Return a difference in whole days, or in hours below two days."""
    unit = "days" if seconds >= 2 * _SECONDS_OF["days"] else "hours"
    return f"{seconds / _SECONDS_OF[unit]:,.0f} {unit}"
