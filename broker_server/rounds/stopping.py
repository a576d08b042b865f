"""Stopping a run in the middle, so that it is gone on with later: on request, and on the signals of a terminal."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class StopRequested(Exception):  # noqa: N818  (not an error: the operator wants the run to stop)
    """Whoever waits for a run's devices was asked to stop; the run goes on when it is started again."""


@contextlib.contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call a function on SIGTERM and SIGINT while the block lasts; does nothing outside the main thread.

    Args:
        stop: must be safe to call in a signal handler, as `threading.Event.set` is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(_number: int, _frame: FrameType | None) -> None:
        stop()

    before: dict[signal.Signals, Any] = {
        number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
