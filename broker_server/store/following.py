"""Notices when a store was written, from the times of its files, which are cheap to read."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from broker_server.store.schema import DATABASE

LOOK_SECONDS = 1.0
"""Time between two checks of the files."""


def file_states(store: Path) -> list[tuple[int, int]]:
    """Return times and sizes of the files that a commit changes."""
    states = []
    for name in (DATABASE, f"{DATABASE}-wal"):
        with suppress(OSError):
            status = (store / name).stat()
            states.append((status.st_mtime_ns, status.st_size))
    return states


def changes(store: Path, over: threading.Event) -> Iterator[None]:
    """Yield once now, and again whenever the store has been written, until `over` is set."""
    last = None
    while not over.is_set():
        now = file_states(store)
        if now != last:
            last = now
            yield
        over.wait(LOOK_SECONDS)
