"""How long a client waits before it connects again.

A broker that does not answer costs nothing to ask, so it is asked twice a minute. One that refuses
a client, or ends each of its connections, is asked less and less often: at last once an hour.
"""

import random
from collections.abc import Callable
from enum import Enum

from fleet_protocol.transport import BACKOFF_MAX_SECONDS

FIRST_SECONDS = 0.5
STEADY_SECONDS = 60.0  # that a connection lasts, after which the ones before it are forgotten

_BROKEN_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0, 256.0, 1024.0, 3600.0)
_REFUSED_SECONDS = (2.0, 20.0, 200.0, 1800.0, 3600.0)


class Failure(Enum):
    """How an attempt to be connected failed; the value is its longest waits, one after another."""

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
        self._connected_at: float | None = None

    def note_connection(self, now: float) -> None:
        """Note that a connection was made at a ``time.monotonic()``."""
        self._unreached = 0
        self._connected_at = now

    def wait_unreached(self) -> float:
        """Return the seconds to wait for a broker that did not answer."""
        longest = min(BACKOFF_MAX_SECONDS, FIRST_SECONDS * 2**self._unreached)
        if longest < BACKOFF_MAX_SECONDS:
            self._unreached += 1
        # Full jitter, so that the boards of a fleet do not return at the same time.
        return self._draw(FIRST_SECONDS / 2, longest)

    def forgive(self) -> None:
        """Forget the failures so far: their cause is gone."""
        self._failures.clear()

    def wait_lost(self, now: float) -> float:
        """Return the seconds to wait after the loss of a connection at a ``time.monotonic()``."""
        if self._connected_at is not None and now - self._connected_at >= STEADY_SECONDS:
            self._failures.clear()
        self._connected_at = None
        return self._wait(Failure.BROKEN)

    def wait_refused(self) -> float:
        """Return the seconds to wait after the broker refused a connection."""
        return self._wait(Failure.REFUSED)

    def _wait(self, failure: Failure) -> float:
        count = self._failures.get(failure, 0)
        waits = failure.value
        self._failures[failure] = count + 1
        longest = waits[min(count, len(waits) - 1)]
        # At least the half: what is refused again and again shall cost little.
        return self._draw(longest / 2, longest)
