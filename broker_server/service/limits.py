"""Limits the rate of messages that the server reads, for each device and for all unknown names.

Messages above a rate are counted and not read. Nothing is lost that a device would not send again:
offers are repeated, updates announced again, and chunks requested again.
"""

from collections.abc import Callable
from dataclasses import dataclass

from fleet_protocol.errors import RefusalReason, RefusedError


@dataclass(frozen=True)
class Rate:
    """A rate in the long run, and the largest burst."""

    per_second: float
    burst: int


DEVICE = Rate(100, 400)  # statuses and replies of one device; a quick round has some 20
STRANGE_REPLIES = Rate(
    20, 50
)  # each is read and answered, so that a device learns that the server does not know it
STRANGE_STATUSES = Rate(1000, 10_000)  # a whole fleet may connect at once
LINES = Rate(5, 100)  # of the log, about refused messages


class TokenBucket:
    """Allows a rate, and short bursts above it: tokens arrive at the rate, up to one burst."""

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._left = float(rate.burst)
        self._at: float | None = None

    def spend(self, now: float, count: int = 1) -> bool:
        """Spend tokens at a ``time.monotonic()``; return whether there were enough."""
        since = 0.0 if self._at is None else now - self._at
        self._at = now
        self._left = min(float(self._rate.burst), self._left + since * self._rate.per_second)
        if self._left < count:
            return False
        self._left -= count
        return True


class Limits:
    """Decides which messages of devices are read.

    `knows` says whether a device has announced itself before.
    """

    def __init__(self, knows: Callable[[str], bool]) -> None:
        self._knows = knows
        self._devices: dict[str, TokenBucket] = {}  # of known devices, so no more than there are
        statuses = TokenBucket(STRANGE_STATUSES)
        self._strange = {
            "reply": TokenBucket(STRANGE_REPLIES),
            "status": statuses,
            "profile": statuses,
        }

    def check(self, device: str, channel: str, now: float, size: int = 0) -> None:
        """Check that a message on a device's topic may be read at a ``time.monotonic()``.

        A long message counts as several.

        Raises:
            RefusedError: too many messages have arrived.
        """
        bucket = self._strange[channel] if not self._knows(device) else self._devices.get(device)
        if bucket is None:
            bucket = self._devices[device] = TokenBucket(DEVICE)
        if not bucket.spend(now, 1 + size // 2048):
            raise RefusedError(
                RefusalReason.TOO_MANY, f"more messages from {device} than the server reads"
            )
