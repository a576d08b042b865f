"""Runs jobs in processes of their own, as many at a time as cores and memory allow.

Their only result is what they write.

A process is a copy of this one (fork): a model that is a function in a user's file needs no name
by which another process would find it, and what was loaded is loaded once. PyTorch must be on one
thread before.
"""

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from fleet_protocol import errors
from fleet_protocol.errors import ExportError, ShoalError

ReportStage = Callable[[str], None]
"""Called with the name of each stage of a job as it begins."""

_SILENCE_SECONDS = 3600.0  # without a message from any job
_BUDGET_BYTES = 1_500_000_000  # of all jobs together, where their number is not set
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux


@dataclass(frozen=True)
class Job:
    """Something to do in a process of its own.

    Attributes:
        name: for messages.
        nbytes: memory that it takes beside what all processes share.
        run: does it.
    """

    name: str
    nbytes: int
    run: Callable[[ReportStage], None]


def run_jobs(jobs: Sequence[Job], workers: int | None, report: Callable[[str, str], None]) -> None:
    """Run all jobs, the largest first.

    Args:
        jobs: what to run.
        workers: how many run at a time, if the free memory holds them: 1 for all in this process,
            None for one for each core and 1.5 GB at most.
        report: called with a job's name and stage.

    Raises:
        ShoalError: what the first job that failed raised; the others were stopped.
        ExportError: a process was killed, or none sent anything for an hour.
    """
    waiting = sorted(jobs, key=lambda job: -job.nbytes)
    count = len(_cores()) if workers is None else workers
    if min(count, len(jobs)) <= 1 or not hasattr(os, "fork"):
        for job in waiting:
            job.run(partial(report, job.name))
        return
    free = _free_bytes()
    running = _Running(min(free, _BUDGET_BYTES) if workers is None else free, count)
    try:
        while waiting or running.jobs:
            while waiting and running.has_room(waiting[0]):
                running.start(waiting.pop(0))
            running.receive(report)
    finally:
        running.stop()


class _Running:
    """The jobs that run now, by the pipe that each reports on."""

    def __init__(self, budget: int, count: int) -> None:
        self.budget = budget
        self.count = count
        self.jobs: dict[Connection, tuple[Job, BaseProcess]] = {}

    def has_room(self, job: Job) -> bool:
        """Return whether another job may start; one may always run, however large it is."""
        used = sum(running.nbytes for running, _ in self.jobs.values())
        return not self.jobs or (len(self.jobs) < self.count and used + job.nbytes <= self.budget)

    def start(self, job: Job) -> None:
        """Start a job."""
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(job, sender, os.getpid()), name=job.name)
        with warnings.catch_warnings():
            # Python warns where a progress bar has a thread, which a job does not use.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        # Closed here, so that the pipe ends with the process.
        sender.close()
        self.jobs[receiver] = (job, process)

    def receive(self, report: Callable[[str, str], None]) -> None:
        """Wait for messages, pass stages on, and forget jobs that ended."""
        ready = wait(list(self.jobs), timeout=_SILENCE_SECONDS)
        if not ready:
            names = ", ".join(job.name for job, _ in self.jobs.values())
            raise ExportError(
                f"the export of {names} stands still; export with --jobs 1 to see where"
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
        """Forget a job whose process ended."""
        job, process = self.jobs.pop(receiver)
        process.join()
        if process.exitcode:
            raise ExportError(
                f"the process that exported {job.name} ended with {process.exitcode} (-9: killed,"
                " usually for want of memory); nothing is published; export with --jobs 1"
            ) from None

    def stop(self) -> None:
        """Kill what still runs."""
        for receiver, (_, process) in self.jobs.items():
            process.kill()
            process.join()
            receiver.close()


def _work(job: Job, sender: Connection, parent: int) -> None:
    """Do a job in the process that was forked for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)

    def report(stage: str) -> None:
        if os.getppid() != parent:  # it was killed, and nothing waits for this
            os._exit(1)
        sender.send_bytes(json.dumps({"stage": stage}).encode())

    try:
        job.run(report)
    except (ShoalError, OSError) as error:
        kind = type(error).__name__ if isinstance(error, ShoalError) else "StorageError"
        sender.send_bytes(json.dumps({"error": kind, "text": str(error)}).encode())


def _cores() -> Sequence[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)


def _free_bytes() -> int:
    """Return memory that is free, in this container if it is one; no bound if nothing says."""
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
