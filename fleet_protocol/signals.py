"""Ending cleanly when the system, or somebody at a terminal, asks for it."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def on_signals(handle: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Call a function on SIGTERM and SIGINT while the block lasts.

    Does nothing outside the main thread.

    The function must be safe to call in a signal handler, as `threading.Event.set` is.
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
