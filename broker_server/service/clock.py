"""The time that the rounds of a fleet go by: without the time in which the broker was away."""

import time


class Clock:
    """``time.monotonic()``, but it stands still while the connection is lost: nobody can answer.

    Args:
        connected: whether the connection is there now.
    """

    def __init__(self, *, connected: bool) -> None:
        # In all, while the connection was lost.
        self._away_seconds = 0.0
        self._stopped_at = None if connected else time.monotonic()

    @property
    def stands(self) -> bool:
        """Whether the broker is away."""
        return self._stopped_at is not None

    def now(self) -> float:
        """Return seconds; only differences mean anything."""
        if self._stopped_at is not None:
            return self._stopped_at - self._away_seconds
        return time.monotonic() - self._away_seconds

    def stop(self) -> None:
        """Stand still; a second call changes nothing."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()

    def go_on(self) -> None:
        """Go on from where the clock has stopped."""
        if self._stopped_at is not None:
            self._away_seconds += time.monotonic() - self._stopped_at
            self._stopped_at = None
