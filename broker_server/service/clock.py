"""The clock of a fleet's rounds, which stops while the broker is unreachable."""

import time


class Clock:
    """``time.monotonic()`` that stops while the connection is lost, when nobody can answer.

    Args:
        connected: whether the connection is there now.
    """

    def __init__(self, *, connected: bool) -> None:
        # total time during which the connection was lost
        self._away_seconds = 0.0
        self._stopped_at = None if connected else time.monotonic()

    @property
    def stands(self) -> bool:
        """Whether the broker is unreachable."""
        return self._stopped_at is not None

    def now(self) -> float:
        """Return seconds; only differences mean anything."""
        if self._stopped_at is not None:
            return self._stopped_at - self._away_seconds
        return time.monotonic() - self._away_seconds

    def stop(self) -> None:
        """Stop the clock; a second call changes nothing."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()

    def go_on(self) -> None:
        """Continue from where the clock has stopped."""
        if self._stopped_at is not None:
            self._away_seconds += time.monotonic() - self._stopped_at
            self._stopped_at = None
