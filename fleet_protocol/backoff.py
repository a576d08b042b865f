"""Decides how long a client waits before it connects again.

Trying a broker that does not answer costs nothing, so the client tries twice a minute. A broker
that refuses a client, or ends each of its connections, is tried less and less often: finally once
an hour.
"""

import random
from collections.abc import Callable
from enum import Enum

from fleet_protocol.transport import BACKOFF_MAX_SECONDS

FIRST_SECONDS = 0.5
STEADY_SECONDS = 60.0  # duration of a connection after which earlier failures are forgotten
# Lost connections in a row that count for nothing, since their cause was dropped: a chunk of 96 kB,
# and then halves of it down to 12 kB. A later loss has another cause, or the same one again.
MOST_FORGIVEN = 4

_BROKEN_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0, 256.0, 1024.0, 3600.0)
_REFUSED_SECONDS = (2.0, 20.0, 200.0, 1800.0, 3600.0)


class Failure(Enum):
    """How an attempt to connect failed; the value lists its longest waits, in order."""

    BROKEN = _BROKEN_SECONDS  # the connection was made, and ended soon
    REFUSED = _REFUSED_SECONDS  # the broker refused it


class Backoff:
    """The waits between the attempts of one client.

    Args:
        draw: returns a number between two others.
    """

    def __init__(self, draw: Callable[[float, float], float] = random.uniform) -> None:
        self._draw = draw
        self._unreached = 0
        self._failures: dict[Failure, int] = {}
        self._forgiven = 0
        self._connected_at: float | None = None

    def note_connection(self, now: float) -> None:
        """Record that a connection was made at a ``time.monotonic()``."""
        self._unreached = 0
        self._connected_at = now

    def wait_unreached(self) -> float:
        """Return how many seconds to wait for a broker that did not answer."""
        longest = min(BACKOFF_MAX_SECONDS, FIRST_SECONDS * 2**self._unreached)
        if longest < BACKOFF_MAX_SECONDS:
            self._unreached += 1
        # Full jitter, so that the boards of a fleet do not return at the same time.
        return self._draw(FIRST_SECONDS / 2, longest)

    def forgive(self) -> None:
        """Forget earlier failures, whose cause is gone, but only a few times in a row."""
        if self._forgiven < MOST_FORGIVEN:
            self._forgiven += 1
            self._failures.clear()

    def wait_lost(self, now: float) -> float:
        """Return how many seconds to wait after losing a connection at a ``time.monotonic()``."""
        if self._connected_at is not None and now - self._connected_at >= STEADY_SECONDS:
            self._failures.clear()
            self._forgiven = 0
        self._connected_at = None
        return self._wait(Failure.BROKEN)

    def wait_refused(self) -> float:
        """Return how many seconds to wait after the broker refused a connection."""
        return self._wait(Failure.REFUSED)

    def _wait(self, failure: Failure) -> float:
        count = self._failures.get(failure, 0)
        waits = failure.value
        self._failures[failure] = count + 1
        longest = waits[min(count, len(waits) - 1)]
        # At least half of it: repeated refusals should cost little.
        return self._draw(longest / 2, longest)
