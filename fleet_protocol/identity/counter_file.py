"""A file of counters to which each new value is appended, so that a server can save every one."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from fleet_protocol.disk import disk_errors
from fleet_protocol.errors import StorageError
from fleet_protocol.identity.enrolment import write_secret

_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
_MOST_LINES = 10_000  # besides four for each counter, before the file is written again
_LINES_PER_COUNTER = 4


class CounterFile:
    """Counters by name, which survive the end of the process.

    A value counts as soon as it is in the file; after a power cut the last ones may be missing.

    Args:
        path: the file, which only its owner may read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = 0

    def read(self) -> dict[str, int]:
        """Return the highest value of each counter; lines that are damaged do not count."""
        counters: dict[str, int] = {}
        text = ""
        with contextlib.suppress(OSError):  # there is no file before the first value
            text = self._path.read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            digits, _, name = line.partition(" ")
            self._lines += 1
            if digits.isascii() and digits.isdigit() and name:
                counters[name] = max(counters.get(name, 0), int(digits))
        return counters

    def save(self, name: str, counters: Mapping[str, int]) -> None:
        """Save the new value of a counter.

        If the disk is full or broken, no value is saved: a server that refused every message would
        be useless.

        Args:
            name: name of the counter.
            counters: all of them, for a file that has grown too long.
        """
        with contextlib.suppress(StorageError):
            if self._lines >= _MOST_LINES + _LINES_PER_COUNTER * len(counters):
                self._rewrite(counters)
            else:
                # The line break comes first: a line torn by a power cut damages no other line.
                self._append(f"\n{counters[name]} {name}")

    def _append(self, line: str) -> None:
        with disk_errors("write", self._path):
            descriptor = os.open(self._path, _FLAGS, 0o600)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)
        self._lines += 1

    def _rewrite(self, counters: Mapping[str, int]) -> None:
        lines = [f"\n{value} {name}" for name, value in counters.items()]
        write_secret(self._path, "".join(lines))
        self._lines = len(lines)
