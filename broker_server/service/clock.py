"""The time that the rounds of a fleet go by: that of this machine, without what the broker was
away.
"""

import time


class Clock:
    """``time.monotonic()``, but it stands still from the loss of the connection on: nobody can
    answer meanwhile.
    """

    def __init__(self, *, connected: bool) -> None:
        self._away = 0.0
        self._stopped_at = None if connected else time.monotonic()

    @property
    def stands(self) -> bool:
        """Whether the broker is away."""
        return self._stopped_at is not None

    def now(self) -> float:
        """Seconds; only differences mean anything."""
        return (time.monotonic() if self._stopped_at is None else self._stopped_at) - self._away

    def stop(self) -> None:
        """The connection is gone; saying so twice changes nothing."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()

    def go_on(self) -> None:
        """The connection is there."""
        if self._stopped_at is not None:
            self._away = self._away + time.monotonic() - self._stopped_at
            self._stopped_at = None
