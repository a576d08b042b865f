"""One worker thread at a time: long computations and uploads report into the agent's inbox, which
stays responsive.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WorkReport:
    """A job, by its number, tells how far it is."""

    job: int
    value: object


@dataclass(frozen=True)
class WorkDone:
    """A job, by its number, has ended well and returned something."""

    job: int
    result: object


@dataclass(frozen=True)
class WorkFailed:
    """A job, by its number, has raised."""

    job: int
    error: Exception


class Job:
    """What a job may ask and tell while it runs; its reports go to the inbox."""

    def __init__(self, number: int, inbox: queue.SimpleQueue[Any]) -> None:
        self.number = number
        self._inbox = inbox
        self._cancelled = threading.Event()

    def stopped(self) -> bool:
        """Whether nobody wants the result any more."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Make :meth:`stopped` true."""
        self._cancelled.set()

    def report(self, value: object) -> None:
        """Tell the agent something."""
        if not self.stopped():
            self._inbox.put(WorkReport(self.number, value))


class Worker:
    """Runs jobs, never two at a time: a new job cancels the old one and begins when it has ended.

    What comes of them goes to the inbox; that of a cancelled job carries an old number.
    """

    def __init__(self, inbox: queue.SimpleQueue[Any]) -> None:
        self._inbox = inbox
        self._job: Job | None = None
        self._thread: threading.Thread | None = None
        self._count = 0

    @property
    def current(self) -> int | None:
        """Number of the job that runs, or whose result is on its way."""
        return self._job.number if self._job else None

    def start(self, name: str, function: Callable[[Job], object]) -> None:
        """Run a function in the worker thread, which has a name for debuggers."""
        self.cancel()
        self._count += 1
        job = Job(self._count, self._inbox)
        before = self._thread

        def run() -> None:
            if before is not None:
                before.join()  # it was cancelled and looks at that between steps
            if job.stopped():
                return
            try:
                result = function(job)
            except Exception as error:  # noqa: BLE001 - whatever it is, the agent decides
                self._inbox.put(WorkFailed(job.number, error))
            else:
                self._inbox.put(WorkDone(job.number, result))

        self._job = job
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Note that the current job's result has arrived."""
        self._job = None

    def cancel(self) -> None:
        """Let the current job end early; its result will carry an old number."""
        if self._job is not None:
            self._job.cancel()
            self._job = None

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the thread to end; False if it still runs."""
        if self._thread is None:
            return True
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()
