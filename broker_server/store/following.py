"""Looking into a store again when it was written: the times of its files tell, and asking for them
costs nothing.
"""

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

LOOK_SECONDS = 1.0  # between two looks at the files


def file_states(store: Path) -> list[tuple[int, int]]:
    """Times and sizes of the files that a commit changes."""
    found = []
    for name in ("shoal.db", "shoal.db-wal"):
        with suppress(OSError):
            status = (store / name).stat()
            found.append((status.st_mtime_ns, status.st_size))
    return found


def changes(store: Path, over: threading.Event) -> Iterator[None]:
    """Once now, and again whenever the store was written since, until it is over."""
    seen = None
    while not over.is_set():
        now = file_states(store)
        if now != seen:
            seen = now
            yield
        over.wait(LOOK_SECONDS)
