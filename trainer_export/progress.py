"""The progress of an export."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """The progress of an export: the name of the stage, and the number of finished stages."""

    tier: str
    stage: str
    done: int
    total: int


class Counter:
    """Counts stages for a progress bar."""

    def __init__(
        self,
        report: Callable[[Progress], None] | None,
        total: int,
    ) -> None:
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
        """Report the end of the export."""
        if self._report is not None:
            self._report(Progress(self._tier, "done", self._total, self._total))
