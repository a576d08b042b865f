"""Processes of this machine, one thread each.

A worker that dies - killed for memory, or crashed in a library - is replaced, and what it worked on
is computed once more by the next free one. Tasks are functions of their items, so the repetition
changes nothing.
"""

import contextlib
import os
import selectors
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO

from pydantic import TypeAdapter

from device_runtime.board import available_cores
from fleet_protocol.child_process import ChildProcess, python_module
from fleet_protocol.errors import ShoalError
from simulation.orders import DeviceTask, Failed, Finished, WorkerSetup, WorkOrder

_ORDERS_PER_WORKER = 2
"""Orders that a worker has at once, so that it does not wait for the store between two of them."""
_END_SECONDS = 5.0
_RESULT: TypeAdapter[Finished | Failed] = TypeAdapter(Finished | Failed)
# Each worker has a core; threads of its libraries would take those of the others.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class WorkerDiedError(ShoalError):
    """A worker died twice over the same work."""

    exit_code = 9


@dataclass
class _Worker:
    """A process.

    Attributes:
        process: the process itself.
        orders: the orders that it has, of which it works on the first.
        unread: the beginning of a line that has not come completely.
        answered: tasks of the first order whose results have come.
    """

    process: ChildProcess
    orders: deque[WorkOrder] = field(default_factory=deque)
    unread: bytes = b""
    answered: set[str] = field(default_factory=set)

    @property
    def open_tasks(self) -> list[DeviceTask]:
        """Tasks of the first order whose results have not come."""
        tasks = []
        for task in self.orders[0].tasks:
            if task.id not in self.answered:
                tasks.append(task)
        return tasks

    @property
    def output(self) -> IO[bytes]:
        """Where its results come from."""
        if self.process.stdout is None:
            raise AssertionError("workers are started with pipes")
        return self.process.stdout

    def send(self, line: str) -> None:
        """Write a line; a dead worker is noticed when its output ends."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(line.encode() + b"\n")
                self.process.stdin.flush()


class LocalEngine:
    """Worker processes on this machine.

    Args:
        workers: number of processes; 0 for one for each core that this process may use.
        setup: what each worker needs.
    """

    def __init__(self, workers: int, setup: WorkerSetup) -> None:
        self._setup = setup
        count = workers or available_cores()
        self._selector = selectors.DefaultSelector()
        self._waiting: deque[WorkOrder] = deque()
        self._losses: dict[str, int] = {}
        self._workers = [self._start() for _ in range(count)]

    def _start(self) -> _Worker:
        """Start a process, and send it the setup."""
        process = ChildProcess(
            python_module("simulation.worker"),
            output=subprocess.PIPE,
            environment={**os.environ, **_ONE_THREAD},
            bufsize=0,
        )
        worker = _Worker(process)
        worker.send(self._setup.model_dump_json())
        # A read returns what has come, and does not wait until a buffer is full.
        os.set_blocking(worker.output.fileno(), False)
        self._selector.register(worker.output, selectors.EVENT_READ, worker)
        return worker

    def submit(self, orders: Sequence[WorkOrder]) -> None:
        """Give it work; see `simulation.orders.Engine`."""
        self._waiting.extend(orders)
        self._hand_out()

    def _hand_out(self) -> None:
        """Send waiting orders to workers that have few, first to those that have none."""
        for depth in range(_ORDERS_PER_WORKER):
            for worker in self._workers:
                if self._waiting and len(worker.orders) == depth:
                    order = self._waiting.popleft()
                    worker.orders.append(order)
                    worker.send(order.model_dump_json())

    def receive(self, timeout_seconds: float) -> list[Finished | Failed]:
        """Wait for results; see `simulation.orders.Engine`.

        Raises:
            WorkerDiedError: a worker died over an order for the second time.
        """
        results: list[Finished | Failed] = []
        deadline = time.monotonic() + timeout_seconds
        while not results:
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            for key, _ in ready:
                results += self._read(key.data)
            if not ready and time.monotonic() >= deadline:
                break
        self._hand_out()
        return results

    def _read(self, worker: _Worker) -> list[Finished | Failed]:
        """Read results that have come from a worker; one whose output has ended is replaced."""
        data = worker.output.read(1 << 20)
        if data is None:
            return []
        if not data:
            self._replace(worker)
            return []
        # What follows the last end of a line is the beginning of the next, or nothing.
        *lines, worker.unread = (worker.unread + data).split(b"\n")
        results = [_RESULT.validate_json(line) for line in lines]
        for result in results:
            worker.answered.add(result.task)
            if not worker.open_tasks:
                worker.orders.popleft()
                worker.answered.clear()
        return results

    def _replace(self, worker: _Worker) -> None:
        """Start another worker for one that died; its orders come before all others."""
        self._selector.unregister(worker.output)
        code = worker.process.end(_END_SECONDS)
        place = self._workers.index(worker)
        del self._workers[place]
        orders = list(worker.orders)
        if orders:
            tasks = worker.open_tasks
            self._count_loss(tasks, code)
            orders[0] = WorkOrder(tasks=tuple(tasks))
        # `extendleft` puts one before the other, which turns their order round.
        self._waiting.extendleft(reversed(orders))
        self._workers.insert(place, self._start())
        self._hand_out()

    def _count_loss(self, tasks: Sequence[DeviceTask], code: int) -> None:
        """Note that a worker died over some work; a WorkerDiedError if it was the second time."""
        first = tasks[0]
        losses = self._losses.get(first.id, 0) + 1
        self._losses[first.id] = losses
        if losses > 1:
            devices = ", ".join(task.device for task in tasks)
            raise WorkerDiedError(
                f"a worker died twice over round {first.round}, {devices} ({first.tier}), the last "
                f"time with {_describe(code)}"
            )

    def close(self) -> None:
        """End the workers; what they work on is lost."""
        for worker in self._workers:
            if worker.orders:
                worker.process.kill()
        for worker in self._workers:
            self._selector.unregister(worker.output)
            worker.process.end(_END_SECONDS)
        self._selector.close()


def _describe(code: int) -> str:
    """Return how a process ended and what to do, for people."""
    if code < 0:
        return f"signal {-code}; with too little memory take fewer workers ([engine] workers)"
    return f"exit code {code}; what it wrote to standard error, above, says why"
