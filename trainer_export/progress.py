"""How far an export is, for a progress bar."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far an export is: the stage for people, and how many stages of all tiers have ended."""

    tier: str
    stage: str
    done: int
    total: int


class Counter:
    """Counts stages for a progress bar."""

    def __init__(self, report: Callable[[Progress], None] | None, total: int) -> None:
        self._report = report
        self._total = total
        self._done = 0
        self._tier = ""

    def start(self, tier: str, stage: str) -> None:
        """Report that a stage starts."""
        self._tier = tier
        if self._report is not None:
            self._report(Progress(tier, stage, self._done, self._total))
        self._done += 1

    def finish(self) -> None:
        """Report that all is done."""
        if self._report is not None:
            self._report(Progress(self._tier, "done", self._total, self._total))
