"""Keeps the time for which an agent's broker is away, and notices connections that end at once."""

from collections import deque

# So many losses in so short a time: something ends connections as soon as they are made.
_LOSSES = 5
_LOSSES_SECONDS = 30.0


class ConnectionLog:
    """The connection of an agent, as far as its link has reported.

    Attributes:
        gone_since: ``time.monotonic()`` of the loss of the connection; None while there is one.
        greeted: whether there has been a connection before.
    """

    def __init__(self) -> None:
        self.gone_since: float | None = None
        self.greeted = False
        self._losses: deque[float] = deque(maxlen=_LOSSES)

    def lose(self, now: float) -> bool:
        """Note a loss; return whether connections end as soon as they are made."""
        if self.gone_since is None:
            self.gone_since = now
        self._losses.append(now)
        if len(self._losses) < _LOSSES or now - self._losses[0] >= _LOSSES_SECONDS:
            return False
        self._losses.clear()
        return True

    def regain(self, now: float) -> float:
        """Note a connection; return for how many seconds there was none."""
        if self.gone_since is None:
            return 0.0
        away_seconds = now - self.gone_since
        self.gone_since = None
        return away_seconds
