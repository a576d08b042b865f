"""One worker thread at a time, for long computations and uploads.

It reports into the agent's inbox, whose loop stays responsive.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WorkReport:
    """Progress of a job, with the job's number."""

    job: int
    value: object


@dataclass(frozen=True)
class WorkDone:
    """The result of a job, with the job's number."""

    job: int
    result: object


@dataclass(frozen=True)
class WorkFailed:
    """The error that ended a job, with the job's number."""

    job: int
    error: Exception


class Job:
    """The worker's side of a running job; its reports go to the inbox."""

    def __init__(self, number: int, inbox: queue.SimpleQueue[Any]) -> None:
        self.number = number
        self._inbox = inbox
        self._cancelled = threading.Event()

    def stopped(self) -> bool:
        """Return whether the result is no longer wanted."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Make :meth:`stopped` true."""
        self._cancelled.set()

    def report(self, value: object) -> None:
        """Report a value to the agent."""
        if not self.stopped():
            self._inbox.put(WorkReport(self.number, value))


class Worker:
    """Runs jobs, one at a time: a new job cancels the previous one and begins when that has ended.

    Results go to the inbox; that of a cancelled job has an old number.
    """

    def __init__(self, inbox: queue.SimpleQueue[Any]) -> None:
        self._inbox = inbox
        self._job: Job | None = None
        self._thread: threading.Thread | None = None
        self._count = 0

    @property
    def current(self) -> int | None:
        """Number of the job that runs, or whose result is not yet handled."""
        return self._job.number if self._job else None

    def start(self, name: str, function: Callable[[Job], object]) -> None:
        """Run a function in the worker thread, under a thread name for debuggers."""
        self.cancel()
        self._count += 1
        job = Job(self._count, self._inbox)
        # A daemon thread: a step that does not end must not keep the process alive.
        thread = threading.Thread(
            target=self._run,
            args=(job, function, self._thread),
            name=name,
            daemon=True,
        )
        self._job = job
        self._thread = thread
        thread.start()

    def _run(
        self,
        job: Job,
        function: Callable[[Job], object],
        before: threading.Thread | None,
    ) -> None:
        """Run a job in its thread, once the previous thread has ended."""
        if before is not None:
            before.join()  # it was cancelled, and checks that between steps
        if job.stopped():
            return
        try:
            result = function(job)
        except Exception as error:  # noqa: BLE001 - whatever it is, the agent decides
            self._inbox.put(WorkFailed(job.number, error))
        else:
            self._inbox.put(WorkDone(job.number, result))

    def finish(self) -> None:
        """Record that the current job's result has arrived."""
        self._job = None

    def cancel(self) -> None:
        """Cancel the current job; its result will have an old number."""
        if self._job is not None:
            self._job.cancel()
            self._job = None

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the thread to end; False if it still runs."""
        if self._thread is None:
            return True
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()
