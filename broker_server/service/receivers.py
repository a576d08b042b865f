"""The receivers of a server: starts them, assigns tasks to them, and restarts those that fail."""

import contextlib
import itertools
import queue
import shlex
import subprocess
import threading
import time
import zlib
from collections.abc import Iterable
from typing import Any

from typing_extensions import Self

from broker_server.rounds.collecting import OpenTask
from broker_server.service.receiver import ORDERS_SECONDS
from broker_server.service.receiver_messages import (
    AnnouncedUpdate,
    AssignedTask,
    AssignedTasks,
    Order,
    ReceiverSettings,
    Report,
)
from broker_server.store import TaskRecord
from fleet_protocol.child_process import ChildProcess, python_module
from fleet_protocol.errors import TransportError
from fleet_protocol.manifest import Manifest
from fleet_protocol.messages import BlobRef, Instructions
from fleet_protocol.transport import WireCount

# without a report: one arrives every second, and less often if the disk is slow
HANG_SECONDS = 30.0
_PING_SECONDS = ORDERS_SECONDS / 4
_START_SECONDS = 300.0  # until the first report, on a busy machine
_PAUSE_SECONDS = 1.0  # between two starts of one receiver


class _Child:
    """One receiver process, with a thread that writes its orders and one that reads its reports.

    Args:
        settings: the first line that it receives.
        inbox: receives its reports.
        host: where it runs; None for this computer.
    """

    def __init__(
        self, settings: ReceiverSettings, inbox: "queue.SimpleQueue[Any]", host: str | None
    ) -> None:
        self.host = host
        self.where = "" if host is None else f" on {host}"
        self.began = time.monotonic()
        self.reported = self.began  # when its last report arrived
        self.last = Report()
        self.ready = threading.Event()
        self._inbox = inbox
        self._orders: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        command = python_module("broker_server.service.receiver")
        if host is not None:
            command = ["ssh", "-oBatchMode=yes", host, shlex.join(command)]
        self.process = ChildProcess(command, output=subprocess.PIPE)
        self._orders.put(settings.to_bytes())
        self._threads = [
            threading.Thread(target=self._write_orders, daemon=True),
            threading.Thread(target=self._read_reports, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def send(self, order: Order) -> None:
        """Send an order, without waiting until it is read."""
        self._orders.put(order.to_bytes())

    def _write_orders(self) -> None:
        with contextlib.suppress(OSError), self.process.stdin as pipe:  # type: ignore[union-attr]
            while True:
                line = self._next_line()
                if line is None:
                    return
                pipe.write(line + b"\n")
                pipe.flush()

    def _next_line(self) -> bytes | None:
        try:
            return self._orders.get(timeout=_PING_SECONDS)
        except queue.Empty:
            return b""  # only shows that the server is running

    def _read_reports(self) -> None:
        with self.process.stdout as pipe:  # type: ignore[union-attr]
            for line in pipe:
                if not line.endswith(b"\n"):
                    return  # it was killed while it wrote this
                report = Report.model_validate_json(line)
                self.reported = time.monotonic()
                self.last = report
                self.ready.set()
                if report.outcomes or report.active_tasks or report.failed:
                    self._inbox.put(report)

    def why_failed(self, now: float) -> str:
        """Return why the process must be replaced at a ``time.monotonic()``; empty if it works."""
        if now - self.began < _PAUSE_SECONDS:
            return ""
        code = self.process.poll()
        # On another host, the process that has ended is ssh: the receiver ends by itself when it
        # gets no orders. Until then, a second one would run beside it.
        if code is not None and self.host is None:
            return f"ended with {code}"
        starting = code is None and not self.ready.is_set()
        patience = _START_SECONDS if starting else HANG_SECONDS
        if now - self.reported < patience:
            return ""
        return f"did not report for {patience:g} s" if code is None else f"ended with {code}"

    def end(self) -> None:
        """Kill the process; its reports stay valid."""
        self.process.kill()
        self._orders.put(None)
        for thread in self._threads:
            thread.join()
        self.process.end()


class Receivers:
    """All receivers of a server.

    Args:
        settings: the first line for each of them; also defines their number and hosts.
        inbox: receives their reports.
    """

    def __init__(self, settings: ReceiverSettings, inbox: "queue.SimpleQueue[Any]") -> None:
        self._settings = settings
        self._inbox = inbox
        # Kept for a receiver that is restarted.
        self._tasks: dict[str, OpenTask] = {}
        self._ended: list[Report] = []  # the last report of each process that was replaced
        count = settings.broker.receivers
        hosts = itertools.cycle(settings.broker.receiver_hosts or (None,))
        self._children = [_Child(settings, inbox, host) for host in itertools.islice(hosts, count)]

    def __enter__(self) -> Self:
        deadline = time.monotonic() + self._settings.broker.connect_timeout_seconds
        for child in self._children:
            while not child.ready.wait(0.1):
                if child.process.poll() is not None or time.monotonic() > deadline:
                    self.__exit__()
                    raise TransportError(
                        f"a process{child.where} that receives updates ([broker] receivers) "
                        "does not start; its output is above"
                    )
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.end()

    @property
    def pids(self) -> list[int]:
        """Return the ids of the processes."""
        return [child.process.pid for child in self._children]

    def _last_reports(self) -> list[Report]:
        return [*self._ended, *(child.last for child in self._children)]

    @property
    def wire(self) -> WireCount:
        """Return the bytes exchanged so far."""
        sent = 0
        received = 0
        for report in self._last_reports():
            sent += report.sent
            received += report.received
        return WireCount(sent, received)

    @property
    def cpu_seconds(self) -> float:
        """Return the processor time of all receivers so far."""
        return sum(report.cpu_seconds for report in self._last_reports())

    def _index_of(self, task: str) -> int:
        return zlib.crc32(task.encode()) % len(self._children)

    def assign(self, tasks: Iterable[OpenTask]) -> None:
        """Assign these tasks, each to one receiver, replacing the previous ones."""
        self._tasks = {task.record.id: task for task in tasks}
        for index, child in enumerate(self._children):
            child.send(self._tasks_for(index))

    def _tasks_for(self, index: int) -> AssignedTasks:
        assigned: list[AssignedTask] = []
        instructions: list[Instructions] = []
        manifests: dict[str, Manifest] = {}
        for name, task in self._tasks.items():
            if self._index_of(name) != index:
                continue
            # Most tasks share their instructions, which are long: each is written once.
            if task.instructions not in instructions:
                instructions.append(task.instructions)
            position = instructions.index(task.instructions)
            assigned.append(AssignedTask(record=task.record, instructions=position))
            manifests[task.record.tier] = task.manifest
            manifests.update(task.manifests)
        return AssignedTasks(
            tasks=tuple(assigned), instructions=tuple(instructions), manifests=manifests
        )

    def announce(self, record: TaskRecord, update: BlobRef) -> None:
        """Forward the announcement of a device that its update is complete."""
        order = AnnouncedUpdate(task=record.id, tier=record.tier, update=update)
        self._children[self._index_of(record.id)].send(order)

    def restart_failed(self, now: float) -> list[str]:
        """Restart the receivers that have died or hang; return a log line for each."""
        problems = []
        for index, child in enumerate(self._children):
            why = child.why_failed(now)
            if not why:
                continue
            child.end()
            self._ended.append(child.last)
            problems.append(
                f"receiver {index + 1}{child.where} {why}; it was restarted, and is asked "
                "again for everything that it had not reported"
            )
            self._restart(index)
        return problems

    def _restart(self, index: int) -> None:
        for name, task in list(self._tasks.items()):
            if task.record.phase.answered:
                del self._tasks[name]
        child = _Child(self._settings, self._inbox, self._children[index].host)
        self._children[index] = child
        child.send(self._tasks_for(index))
        # The announcements that the previous process may not have reported on.
        for name, task in self._tasks.items():
            if self._index_of(name) == index and task.announced is not None:
                update = task.announced.update
                child.send(AnnouncedUpdate(task=name, tier=task.record.tier, update=update))
