"""Computes in processes of this machine, one thread each.

A worker that dies (out of memory, or by a crash in a library) is replaced, and the next free worker
repeats its work. Tasks are pure functions of their inputs, so the repetition does not change
results.
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
"""Orders that a worker has at once, so that it does not wait for the store between them."""
_END_SECONDS = 5.0
_RESULT: TypeAdapter[Finished | Failed] = TypeAdapter(Finished | Failed)
# Each worker has one core; more threads of its libraries would compete with other workers.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class WorkerDiedError(ShoalError):
    """A worker died twice during the same work."""

    exit_code = 9


@dataclass
class _Worker:
    """A process.

    Attributes:
        process: the process itself.
        orders: its orders; it works on the first.
        unread: the received part of an incomplete line.
        answered: tasks of the first order whose results have arrived.
    """

    process: ChildProcess
    orders: deque[WorkOrder] = field(default_factory=deque)
    # Bytes, because a line may be cut within a character.
    unread: bytes = b""
    answered: set[str] = field(default_factory=set)

    @property
    def open_tasks(self) -> list[DeviceTask]:
        """Return the tasks of the first order without results."""
        tasks = []
        for task in self.orders[0].tasks:
            if task.id not in self.answered:
                tasks.append(task)
        return tasks

    @property
    def output(self) -> IO[bytes]:
        """Return the stream of its results."""
        if self.process.stdout is None:
            raise AssertionError("workers are started with pipes")
        return self.process.stdout

    def send(self, line: str) -> None:
        """Write a line; a dead worker is detected by the end of its output."""
        if self.process.stdin is not None:
            # The order is not lost: a worker that died is replaced, with its orders.
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(line.encode() + b"\n")
                self.process.stdin.flush()


class LocalEngine:
    """Worker processes on this machine.

    Args:
        workers: number of processes; 0 for one per available core.
        setup: the setup of each worker.
    """

    def __init__(self, workers: int, setup: WorkerSetup) -> None:
        self._setup = setup
        # One thread for each worker, so as many workers as cores.
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
        # A read returns the available data and does not wait for a full buffer.
        os.set_blocking(worker.output.fileno(), False)
        self._selector.register(worker.output, selectors.EVENT_READ, worker)
        return worker

    def submit(self, orders: Sequence[WorkOrder]) -> None:
        """Add orders; see `simulation.orders.Engine`."""
        self._waiting.extend(orders)
        self._hand_out()

    def _hand_out(self) -> None:
        """Send waiting orders to workers that have few, first to those that have none."""
        # Two passes: every worker has one order before any has two.
        for depth in range(_ORDERS_PER_WORKER):
            for worker in self._workers:
                if self._waiting and len(worker.orders) == depth:
                    order = self._waiting.popleft()
                    worker.orders.append(order)
                    worker.send(order.model_dump_json())

    def receive(self, timeout_seconds: float) -> list[Finished | Failed]:
        """Wait for results; see `simulation.orders.Engine`.

        Raises:
            WorkerDiedError: a worker died during an order for the second time.
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
        """Read the available results of a worker; replace a worker whose output has ended."""
        data = worker.output.read(1 << 20)
        # Nothing to read yet, though the selector reported the stream.
        if data is None:
            return []
        # No bytes are the end of the output: the process has ended.
        if not data:
            self._replace(worker)
            return []
        # The text after the last line end is the beginning of the next line, or empty.
        *lines, worker.unread = (worker.unread + data).split(b"\n")
        results = [_RESULT.validate_json(line) for line in lines]
        for result in results:
            worker.answered.add(result.task)
            # Results of one order may arrive one by one.
            if not worker.open_tasks:
                worker.orders.popleft()
                worker.answered.clear()
        return results

    def _replace(self, worker: _Worker) -> None:
        """Replace a dead worker; its orders come before all others."""
        self._selector.unregister(worker.output)
        code = worker.process.end(_END_SECONDS)
        place = self._workers.index(worker)
        del self._workers[place]
        orders = list(worker.orders)
        if orders:
            # Tasks with results are not repeated; the results are already on their way.
            tasks = worker.open_tasks
            self._count_loss(tasks, code)
            orders[0] = WorkOrder(tasks=tuple(tasks))
        # `extendleft` reverses the order.
        self._waiting.extendleft(reversed(orders))
        # At the same place, so that the order of the workers stays.
        self._workers.insert(place, self._start())
        self._hand_out()

    def _count_loss(self, tasks: Sequence[DeviceTask], code: int) -> None:
        """Record that a worker died during some work; raises a WorkerDiedError the second time."""
        # Orders begin with different tasks, so the first open one names the work.
        first = tasks[0]
        losses = self._losses.get(first.id, 0) + 1
        self._losses[first.id] = losses
        if losses > 1:
            devices = ", ".join(task.device for task in tasks)
            raise WorkerDiedError(
                f"a worker died twice during round {first.round}, {devices} ({first.tier}), the"
                f" last time with {_describe(code)}"
            )

    def close(self) -> None:
        """Stop the workers; their current work is lost."""
        # A worker without orders ends by itself when its input closes.
        for worker in self._workers:
            if worker.orders:
                worker.process.kill()
        for worker in self._workers:
            self._selector.unregister(worker.output)
            worker.process.end(_END_SECONDS)
        self._selector.close()


def _describe(code: int) -> str:
    """Return how a process ended and what to do, as text."""
    if code < 0:
        # A negative code is the number of the signal; memory is the usual reason.
        return f"signal {-code}; if memory ran out, use fewer workers ([engine] workers)"
    return f"exit code {code}; its output on standard error above gives the reason"
