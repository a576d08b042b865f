"""Makes an agent that its fleet has shut out wait for its operator, instead of retrying.

The operator replaces the enrolment or the login. The agent notices that a file has changed, and
restarts with it.
"""

import queue
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from device_runtime.agent.stop_request import StopRequested

LOOK_SECONDS = 5.0  # between two checks of the files
REFUSED_SECONDS = 3600.0  # after which a service retries a broker that refuses its login


class WatchedFiles:
    """The files that define a board's identity and its broker.

    Args:
        paths: paths of the files; a missing file counts as changed when it appears.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(paths)
        self._states = self._read()

    def have_changed(self) -> bool:
        """Return whether a file's content differs from that at the start of the agent."""
        return self._read() != self._states

    def _read(self) -> list[tuple[int, int, int] | None]:
        states: list[tuple[int, int, int] | None] = []
        for path in self._paths:
            try:
                status = path.stat()
            except OSError:
                states.append(None)
            else:
                states.append((status.st_ino, status.st_size, status.st_mtime_ns))
        return states


def wait_for_change(
    files: WatchedFiles,
    inbox: queue.SimpleQueue[Any],
    seconds: float,
    alive: Callable[[], None],
) -> bool:
    """Wait until a file changes, the agent must stop, or the time is over.

    Args:
        files: files of the board.
        inbox: inbox of the agent; other events in it are dropped.
        seconds: longest wait.
        alive: called repeatedly.

    Returns:
        Whether a file has changed.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        alive()
        if files.have_changed():
            return True
        left = deadline - time.monotonic()
        try:
            event = inbox.get(timeout=max(0.0, min(LOOK_SECONDS, left)))
        except queue.Empty:
            continue
        if isinstance(event, StopRequested):
            return False
    return False
