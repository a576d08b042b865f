"""How long a board or a server keeps a message back after the broker has refused one of its kind.

Some brokers end the connection with each refused message, so a program without the right to
announce itself would otherwise connect and be refused all day.
"""

import math

_WAITS_SECONDS = (20.0, 200.0, 1800.0, 3600.0)


class RefusedPresence:
    """The times at which a program may announce itself again.

    Attributes:
        due: ``time.monotonic()`` of the next attempt; infinity if nothing is kept back.
    """

    def __init__(self) -> None:
        """Start with nothing refused."""
        self.due = math.inf
        self._refusals = 0
        self._attempts_at = -math.inf

    def note(self, now: float) -> None:
        """Record a refusal at a ``time.monotonic()``, and wait longer than the last time.

        A board sends status and profile together, so a refusal while they are kept back belongs to
        the same attempt.
        """
        if now < self._attempts_at:
            return
        wait = _WAITS_SECONDS[min(self._refusals, len(_WAITS_SECONDS) - 1)]
        self._refusals += 1
        self._attempts_at = now + wait
        self.due = self._attempts_at

    def holds(self, now: float) -> bool:
        """Return whether messages are kept back at a ``time.monotonic()``."""
        if now >= self._attempts_at:
            self.due = math.inf
        return now < self._attempts_at
