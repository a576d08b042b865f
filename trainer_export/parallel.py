"""Runs jobs in parallel processes, as many at a time as cores and memory allow.

Their only results are the files that they write.

Each process is a fork of this one. So a model that is a function in a user's file does not need an
importable name, and modules are loaded once. PyTorch must use one thread before the fork.
"""

import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from fleet_protocol import errors
from fleet_protocol.errors import ChoiceError, ShoalError

ReportStage = Callable[[str], None]
"""Called with the name of each stage of a job as it begins."""

_SILENCE_SECONDS = 3600.0  # seconds without a message from any job
_BUDGET_BYTES = 1_500_000_000  # memory of all jobs together if their number is not set
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux


@dataclass(frozen=True)
class Job:
    """A job for a separate process.

    Attributes:
        name: name for messages.
        nbytes: memory that it takes in addition to shared memory.
        run: runs the job.
    """

    name: str
    nbytes: int
    run: Callable[[ReportStage], None]


def run_jobs(
    jobs: Sequence[Job],
    workers: int | None,
    report: Callable[[str, str], None],
    prepare: Callable[[], None] = lambda: None,
) -> None:
    """Run all jobs, the largest first.

    Args:
        jobs: the jobs.
        workers: number of parallel jobs, if the free memory allows it: 1 runs all in this process,
            None runs one per core with at most 1.5 GB.
        report: called with a job's name and stage.
        prepare: called before processes start, to load what each of them would load.

    Raises:
        ShoalError: the error of the first failed job; the other jobs were stopped.
        ExportError: a process was killed, or no process sent a message for an hour.
    """
    waiting = sorted(jobs, key=lambda job: -job.nbytes)
    count = len(_cores()) if workers is None else workers
    if min(count, len(jobs)) <= 1 or not hasattr(os, "fork"):
        for job in waiting:
            job.run(partial(report, job.name))
        return
    free = _free_bytes()
    running = _Running(min(free, _BUDGET_BYTES) if workers is None else free, count)
    prepare()
    try:
        while waiting or running.jobs:
            while waiting and running.has_room(waiting[0]):
                running.start(waiting.pop(0))
            running.receive(report)
    finally:
        running.stop()


class _Running:
    """The running jobs, by the pipe of their reports."""

    def __init__(self, budget: int, count: int) -> None:
        self.budget = budget
        self.count = count
        self.jobs: dict[Connection, tuple[Job, BaseProcess]] = {}

    def has_room(self, job: Job) -> bool:
        """Return whether another job may start; a single job may always run, whatever its size."""
        used = sum(running.nbytes for running, _ in self.jobs.values())
        return not self.jobs or (len(self.jobs) < self.count and used + job.nbytes <= self.budget)

    def start(self, job: Job) -> None:
        """Start a job."""
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_work,
            args=(job, sender, os.getpid()),
            name=job.name,
        )
        with warnings.catch_warnings(), _kept_garbage():
            # Python warns about the thread of a progress bar, which a job does not use.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        # Closed in the parent, so that the pipe ends with the process.
        sender.close()
        self.jobs[receiver] = (job, process)

    def receive(self, report: Callable[[str, str], None]) -> None:
        """Wait for messages, report stages, and remove finished jobs."""
        ready = wait(list(self.jobs), timeout=_SILENCE_SECONDS)
        if not ready:
            names = ", ".join(job.name for job, _ in self.jobs.values())
            raise ChoiceError(
                f"the export of {names} makes no progress; export with --jobs 1 to find the cause"
            )
        for receiver in ready:
            if not isinstance(receiver, Connection):
                continue
            job, _ = self.jobs[receiver]
            try:
                message = json.loads(receiver.recv_bytes())
            except EOFError:
                self._finish(receiver)
                continue
            if "error" in message:
                raise getattr(errors, message["error"], ShoalError)(message["text"])
            report(job.name, message["stage"])

    def _finish(self, receiver: Connection) -> None:
        """Remove a job whose process ended."""
        job, process = self.jobs.pop(receiver)
        process.join()
        if process.exitcode:
            raise ChoiceError(
                f"the process that exported {job.name} ended with exit code {process.exitcode}"
                " (-9: killed, usually because memory ran out); nothing is published; export"
                " with --jobs 1"
            ) from None

    def stop(self) -> None:
        """Kill the running jobs."""
        for receiver, (_, process) in self.jobs.items():
            process.kill()
            process.join()
            receiver.close()


@contextlib.contextmanager
def _kept_garbage() -> Iterator[None]:
    """Keep the garbage collector of a forked process away from what this process made.

    Garbage may hold a session of ONNX Runtime. Its end waits for its threads, but a fork has none
    of them, so that the process would wait forever.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _work(job: Job, sender: Connection, parent: int) -> None:
    """Run a job in its forked process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal signals all; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)

    def report(stage: str) -> None:
        if os.getppid() != parent:  # the job was killed, and no process reads this
            os._exit(1)
        sender.send_bytes(json.dumps({"stage": stage}).encode())

    try:
        job.run(report)
    except (ShoalError, OSError) as error:
        kind = type(error).__name__ if isinstance(error, ShoalError) else "StorageError"
        sender.send_bytes(json.dumps({"error": kind, "text": str(error)}).encode())


def _cores() -> Sequence[int]:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)


def _free_bytes() -> int:
    """Return the free memory, of the container if there is one; infinity if unknown."""
    bounds = [sys.maxsize]
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                bounds.append(1024 * int(line.split()[1]))
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        bounds.append(limit - int((group / "memory.current").read_text()))
    return min(bounds)
