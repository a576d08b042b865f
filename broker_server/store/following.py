"""Notice when a store was written, by the times of its files, which cost nothing to ask for."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

LOOK_SECONDS = 1.0
"""Time between two looks at the files."""


def file_states(store: Path) -> list[tuple[int, int]]:
    """Return times and sizes of the files that a commit changes."""
    states = []
    for name in ("shoal.db", "shoal.db-wal"):
        with suppress(OSError):
            status = (store / name).stat()
            states.append((status.st_mtime_ns, status.st_size))
    return states


def changes(store: Path, over: threading.Event) -> Iterator[None]:
    """Yield once now, and again whenever the store was written since, until `over` is set."""
    last = None
    while not over.is_set():
        now = file_states(store)
        if now != last:
            last = now
            yield
        over.wait(LOOK_SECONDS)
