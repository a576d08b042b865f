"""Runs jobs in processes of their own, as many at a time as cores and memory allow.

What they write is all they give.

A process is a copy of this one (fork): a model that is a function in somebody's file needs no name
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
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from fleet_protocol import errors
from fleet_protocol.errors import ExportError, ShoalError

ReportStage = Callable[[str], None]
"""Called with the name of each stage of a job as it begins."""

_PATIENCE_SECONDS = 3600.0  # without a word from any job
_BUDGET_BYTES = 1_500_000_000  # of all jobs together, where nobody says how many
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux


@dataclass(frozen=True)
class Job:
    """Something to do: its name for people, bytes of memory it takes beside what is there, and what
    does it.
    """

    name: str
    nbytes: int
    run: Callable[[ReportStage], None]


def run_jobs(jobs: Sequence[Job], workers: int | None, told: Callable[[str, str], None]) -> None:
    """Run all jobs, the largest first, and call `told` with a job's name and stage.

    So many workers run at a time, if the free memory holds them: 1 for all in this process, None
    for one for each core and 1.5 GB at most.

    Raises:
        ShoalError: what the first job that failed raised; the others were stopped.
        ExportError: a process was killed, or none said anything for an hour.
    """
    ordered = sorted(jobs, key=lambda job: -job.nbytes)
    count = len(_cores()) if workers is None else workers
    if min(count, len(jobs)) <= 1 or not hasattr(os, "fork"):
        for job in ordered:
            job.run(lambda stage, name=job.name: told(name, stage))  # type: ignore[misc]
        return
    free = _free_bytes()
    running = _Running(min(free, _BUDGET_BYTES) if workers is None else free, count)
    try:
        while ordered or running.jobs:
            while ordered and running.has_room(ordered[0]):
                running.start(ordered.pop(0))
            running.listen(told)
    finally:
        running.stop()


class _Running:
    def __init__(self, budget: int, count: int) -> None:
        self.budget = budget
        self.count = count
        self.jobs: dict[Connection, tuple[Job, BaseProcess]] = {}

    def has_room(self, job: Job) -> bool:
        taken = sum(other.nbytes for other, _ in self.jobs.values())
        return not self.jobs or (len(self.jobs) < self.count and taken + job.nbytes <= self.budget)

    def start(self, job: Job) -> None:
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(job, sender, os.getpid()), name=job.name)
        with (
            warnings.catch_warnings()
        ):  # Python warns where a progress bar has a thread, of which a job knows nothing
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        sender.close()
        self.jobs[receiver] = (job, process)

    def listen(self, told: Callable[[str, str], None]) -> None:
        ready = wait(list(self.jobs), timeout=_PATIENCE_SECONDS)
        if not ready:
            names = ", ".join(job.name for job, _ in self.jobs.values())
            raise ExportError(
                f"the export of {names} stands still; export with --jobs 1 to see where"
            )
        for receiver in ready:
            if not isinstance(receiver, Connection):
                continue
            job, process = self.jobs[receiver]
            try:
                word = json.loads(receiver.recv_bytes())
            except EOFError:
                del self.jobs[receiver]
                process.join()
                if process.exitcode:
                    raise ExportError(
                        f"the process that exported {job.name} ended with {process.exitcode} (-9: killed, usually for"
                        " want of memory); nothing is published; export with --jobs 1"
                    ) from None
                continue
            if "error" in word:
                raise getattr(errors, word["error"], ShoalError)(word["text"])
            told(job.name, word["stage"])

    def stop(self) -> None:
        for receiver, (_, process) in self.jobs.items():
            process.kill()
            process.join()
            receiver.close()


def _work(job: Job, sender: Connection, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)

    def tell(stage: str) -> None:
        if os.getppid() != parent:  # it was killed, and nobody waits for this
            os._exit(1)
        sender.send_bytes(json.dumps({"stage": stage}).encode())

    try:
        job.run(tell)
    except (ShoalError, OSError) as error:
        kind = type(error).__name__ if isinstance(error, ShoalError) else "StorageError"
        sender.send_bytes(json.dumps({"error": kind, "text": str(error)}).encode())


def _cores() -> Sequence[int]:
    found = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    return sorted(found)


def _free_bytes() -> int:
    """Memory that is free, in this container if it is one; no bound where nobody says."""
    found = [sys.maxsize]
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        found.append(
            int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        )
    return min(found)
