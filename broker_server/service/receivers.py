"""The receivers of a server: started, given their tasks, listened to, and started again where they
die or hang.
"""

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
from broker_server.service.receiver import (
    ORDERS_SECONDS,
    Announced,
    Begin,
    Given,
    Open,
    Order,
    Report,
)
from broker_server.store import TaskRecord
from fleet_protocol.child_process import python_module
from fleet_protocol.errors import TransportError
from fleet_protocol.manifest import Manifest
from fleet_protocol.messages import BlobRef, Instructions
from fleet_protocol.transport import WireCount

HANG_SECONDS = (
    30.0  # without a report: one comes every second, and more seldom where the disk is slow
)
_PING_SECONDS = ORDERS_SECONDS / 4
_START_SECONDS = 300.0  # until the first one, on a machine that does much else
_PAUSE_SECONDS = 1.0  # between two starts of one receiver


class _Child:
    """One process, here or on a host, with a thread for what it is told and one for what it tells."""

    def __init__(self, begin: Begin, inbox: "queue.SimpleQueue[Any]", host: str | None) -> None:
        self.host = host
        self.where = "" if host is None else f" on {host}"
        self.began = self.told = time.monotonic()
        self.last = Report()
        self.ready = threading.Event()
        self._inbox = inbox
        self._orders: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        command = python_module("broker_server.service.receiver")
        self.process = subprocess.Popen(  # noqa: S603  (our own module; hosts are our configuration's)
            command if host is None else ["ssh", "-oBatchMode=yes", host, shlex.join(command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._orders.put(begin.to_bytes())
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._write, self._read)
        ]
        for thread in self._threads:
            thread.start()

    def order(self, order: Order) -> None:
        """Tell it something, without waiting until it listens."""
        self._orders.put(order.to_bytes())

    def _write(self) -> None:
        with contextlib.suppress(OSError), self.process.stdin as pipe:  # type: ignore[union-attr]
            while (line := self._next()) is not None:
                pipe.write(line + b"\n")
                pipe.flush()

    def _next(self) -> bytes | None:
        try:
            return self._orders.get(timeout=_PING_SECONDS)
        except queue.Empty:
            return b""  # which says that we are there

    def _read(self) -> None:
        with self.process.stdout as pipe:  # type: ignore[union-attr]
            for line in pipe:
                if not line.endswith(b"\n"):
                    return  # it was killed while it told this
                report = Report.model_validate_json(line)
                self.told = time.monotonic()
                self.last = report
                self.ready.set()
                if report.words or report.heard or report.failed:
                    self._inbox.put(report)

    def end(self) -> None:
        """Kill it: nothing that it has told is lost by that."""
        self.process.kill()
        self.process.wait()
        self._orders.put(None)
        for thread in self._threads:
            thread.join()


class Receivers:
    """All receivers of a server.

    Args:
        begin: what they are told first, and where they are to be.
        inbox: where their reports go.
    """

    def __init__(self, begin: Begin, inbox: "queue.SimpleQueue[Any]") -> None:
        self._begin = begin
        self._inbox = inbox
        self._tasks: dict[str, OpenTask] = {}
        self._gone: list[Report] = []  # the last of those that ended
        hosts = itertools.cycle(begin.broker.receiver_hosts or (None,))
        self._children = [
            _Child(begin, inbox, host) for host in itertools.islice(hosts, begin.broker.receivers)
        ]

    def __enter__(self) -> Self:
        deadline = time.monotonic() + self._begin.broker.connect_timeout_seconds
        for child in self._children:
            while not child.ready.wait(0.1):
                if child.process.poll() is not None or time.monotonic() > deadline:
                    self.__exit__()
                    raise TransportError(
                        f"a process{child.where} that receives updates ([broker] receivers) does not come up; what it "
                        "says stands above"
                    )
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.end()

    @property
    def pids(self) -> list[int]:
        """Of the processes now."""
        return [child.process.pid for child in self._children]

    @property
    def wire(self) -> WireCount:
        """Bytes exchanged so far."""
        counts = (*self._gone, *(child.last for child in self._children))
        return WireCount(sum(item.sent for item in counts), sum(item.received for item in counts))

    @property
    def cpu_seconds(self) -> float:
        """Processor time of them all so far."""
        return sum(
            item.cpu_seconds for item in (*self._gone, *(child.last for child in self._children))
        )

    def _place(self, task: str) -> int:
        return zlib.crc32(task.encode()) % len(self._children)

    def open(self, tasks: Iterable[OpenTask]) -> None:
        """Give each its part of these tasks, and no others."""
        self._tasks = {task.record.id: task for task in tasks}
        for place, child in enumerate(self._children):
            child.order(self._part(place))

    def _part(self, place: int) -> Open:
        given: list[Given] = []
        asked: list[Instructions] = []
        manifests: dict[str, Manifest] = {}
        for name, task in self._tasks.items():
            if self._place(name) == place:
                asked += [] if task.instructions in asked else [task.instructions]
                given.append(Given(record=task.record, asked=asked.index(task.instructions)))
                manifests.update({task.record.tier: task.manifest, **task.manifests})
        return Open(tasks=tuple(given), asked=tuple(asked), manifests=manifests)

    def announced(self, record: TaskRecord, update: BlobRef) -> None:
        """Tell of an update that its device says is complete."""
        order = Announced(task=record.id, tier=record.tier, update=update)
        self._children[self._place(record.id)].order(order)

    def turn(self, now: float) -> list[str]:
        """Start again what has died, or hangs; what to say of it."""
        problems = []
        for place, child in enumerate(self._children):
            code = child.process.poll()
            patience = _START_SECONDS if code is None and not child.ready.is_set() else HANG_SECONDS
            # What has ended is ssh, where another host has the receiver: that ends itself where it
            # hears nothing.
            waits = code is None or child.host is not None
            if now - child.began < _PAUSE_SECONDS or (waits and now - child.told < patience):
                continue
            child.end()
            self._gone.append(child.last)
            why = f"told nothing for {patience:g} s" if code is None else f"ended with {code}"
            problems.append(
                f"receiver {place + 1}{child.where} {why}; it was started again, what it had not told is asked again"
            )
            self._tasks = {
                name: task for name, task in self._tasks.items() if not task.record.phase.answered
            }
            fresh = self._children[place] = _Child(self._begin, self._inbox, child.host)
            fresh.order(self._part(place))
            for name, task in self._tasks.items():
                if self._place(name) == place and task.announced is not None:
                    fresh.order(
                        Announced(
                            task=name,
                            tier=task.record.tier,
                            update=task.announced.update,
                        )
                    )
        return problems
