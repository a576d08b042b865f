"""Folds repeated log lines, so that a lasting condition does not fill the log."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

FIRST_SECONDS = 300.0  # after a line until its next one
GROWTH = 4.0  # factor of that time with each line
LONGEST_SECONDS = 3600.0


@dataclass
class _Repetition:
    """A repeated line.

    Attributes:
        due: time at which it is written again.
        pause: seconds from that line to the one after it.
        left_out: number of lines since the last that was written.
        last: time of the newest line, written or not.
    """

    due: float
    pause: float
    left_out: int
    last: float


class FoldedLines:
    """Writes lines to a log: each line the first time, and repetitions less and less often.

    Args:
        log: where the lines are written.
        clock: returns the time in seconds.
    """

    def __init__(
        self, log: Callable[[int, str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._clock = clock
        self._repetitions: dict[str, _Repetition] = {}

    def warning(self, key: str, text: str) -> None:
        """Write a warning; `key` is the same for lines that count as repetitions of each other."""
        self._write(logging.WARNING, key, text)

    def error(self, key: str, text: str) -> None:
        """Write an error; see `warning`."""
        self._write(logging.ERROR, key, text)

    def info(self, key: str, text: str) -> None:
        """Write a line about normal operation; see `warning`."""
        self._write(logging.INFO, key, text)

    def _write(self, level: int, key: str, text: str) -> None:
        line = self._admit(key, text)
        if line:
            self._log(level, line)

    def _admit(self, key: str, text: str) -> str:
        """Return a line in its written form, or nothing if it is left out."""
        now = self._clock()
        repetition = self._repetitions.get(key)
        # A line that has not occurred for so long is new again.
        if repetition is None or now - repetition.last >= 2 * LONGEST_SECONDS:
            self._repetitions[key] = _Repetition(now + FIRST_SECONDS, FIRST_SECONDS, 0, now)
            return text
        repetition.last = now
        if now < repetition.due:
            repetition.left_out += 1
            return ""
        repetition.pause = min(LONGEST_SECONDS, GROWTH * repetition.pause)
        repetition.due = now + repetition.pause
        count = repetition.left_out
        repetition.left_out = 0
        return f"{text} ({count} such lines were left out)" if count else text
