"""Handles the signals by which the system, or a user at a terminal, ends a process."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def on_signals(handle: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Call a function on SIGTERM and SIGINT while the block lasts.

    Outside the main thread nothing happens, because only the main thread can handle signals.

    Args:
        handle: safe to call in a signal handler, as `threading.Event.set` is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def called(number: int, _frame: FrameType | None) -> None:
        handle(signal.Signals(number))

    before = {number: signal.signal(number, called) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
