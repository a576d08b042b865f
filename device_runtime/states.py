"""The states of the agent that begin, wait and end, and the list of all of them.

A state posts events and never chooses its successor; ``device_runtime.machine`` does.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType

from typing_extensions import override

from device_runtime.backends import choose_backend
from device_runtime.board import probe
from device_runtime.busy_states import Fetching, Measuring, Training, Uploading
from device_runtime.compute import Bench
from device_runtime.context import Task
from device_runtime.data import load_data
from device_runtime.machine import Event, State
from device_runtime.personal import Personal
from device_runtime.state_base import DeviceState
from device_runtime.task_store import TaskRecord, resume_event
from fleet_protocol.errors import RefusalReason, StorageError
from fleet_protocol.link import Link
from fleet_protocol.messages import Refuse

__all__ = ["STATES"]

_SESSION_EXPIRY_SECONDS = 3600


class Starting(DeviceState):
    """Reads the data and settles the backend; whatever is wrong with either ends the process."""

    @override
    def enter(self) -> None:
        config = self.ctx.config
        backend = choose_backend(config.backend)
        data = load_data(config.data)
        personal = None
        if config.personal is not None:
            personal = Personal(config.personal.set, config.state_dir, config.personal.keep_runs)
            personal.check()  # a set that is not whole ends the process here, not in the first round
        self.ctx.bench = Bench(data, self.ctx.blobs, backend, config.threads, config.holdout, personal)
        self.ctx.journal.info(f"data {data.source}: {len(data)} samples; backend {backend}")
        self.ctx.post(Event.LOADED)


class Probing(DeviceState):
    """Measures the board, connects, and goes on with a task that is on disk."""

    @override
    def enter(self) -> None:
        ctx, config = self.ctx, self.ctx.config
        ctx.board = probe()
        link = Link(
            config.address(),
            f"shoal-{config.fleet}-{config.device}",
            ctx.inbox,
            will=(ctx.topics.status(config.device), ctx.status(online=False)),
            session_expiry_seconds=_SESSION_EXPIRY_SECONDS,
        )
        link.connect(config.connect_timeout_seconds)
        ctx.link = link
        link.subscribe(ctx.topics.task(config.device))
        ctx.journal.info(f"connected to {link.address}")
        record, problem = ctx.store.load()
        if problem:
            ctx.journal.warning(problem)
        if record is not None:
            self._take_up(record)
        event = resume_event(ctx.task.record if ctx.task else None, ctx.blobs)
        if event is Event.RESUME_POISONED and ctx.task:
            ctx.failure = (
                RefusalReason.FAILED,
                f"this task took the agent down {ctx.task.record.crashes} times; it is not tried again",
            )
        ctx.post(event)

    def _take_up(self, record: TaskRecord) -> None:
        """Make the record the task in hand, the crash that led here counted on disk first."""
        ctx = self.ctx
        crashes = record.crashes + (0 if record.settled else 1)
        now, left = time.monotonic(), max(0.0, record.seconds_left())
        ctx.task = Task(record, deadline=now + left, started=now, resumed=True)
        ctx.journal.follow(record.offer)
        ctx.journal.info(f"found a task in phase {record.phase}, crashes={crashes}, seconds_left={left:.0f}")
        try:
            ctx.save(crashes=crashes, settled=False)
        except StorageError as error:
            ctx.journal.warning(f"cannot count the crash: {error}")


class Idle(DeviceState):
    """Waits for an offer; one may have come while the last task was dropped."""

    @override
    def enter(self) -> None:
        self.ctx.journal.follow(None)
        self.ctx.publish_status()
        if self.ctx.pending is not None:
            offer, self.ctx.pending = self.ctx.pending, None
            self.ctx.take(offer)


class _Ending(DeviceState):
    """Forgets the task; blobs worth keeping stay."""

    @override
    def enter(self) -> None:
        ctx, task = self.ctx, self.ctx.need_task()
        ctx.worker.cancel()
        update = task.record.update
        ctx.store.clear()
        ctx.task, ctx.failure = None, None
        if update is not None:
            ctx.blobs.remove(update.digest)
        ctx.cache.evict(())
        ctx.post(Event.CLEARED)


class Refusing(_Ending):
    """Tells the server why the task ends here.

    A crash between message and forgetting repeats the task after the restart, and with it the refusal.
    """

    @override
    def enter(self) -> None:
        ctx, task = self.ctx, self.ctx.need_task()
        reason, detail = ctx.failure or (RefusalReason.FAILED, "unknown")
        ctx.journal.warning(f"refused: {reason.value}: {detail}")
        ctx.send(Refuse, reason=reason, detail=detail)
        ctx.outcomes.append((task.offer.task, Event.FAILED, (reason, detail)))
        super().enter()


class Dropping(_Ending):
    """Forgets the task without a word: it is merged, or nobody wants it any more."""


class Stopped(DeviceState):
    """Ends the worker, notes that this was no crash, and says good-bye."""

    @override
    def enter(self) -> None:
        ctx = self.ctx
        ctx.worker.cancel()
        if not ctx.worker.join(5.0):
            ctx.journal.warning("the worker thread is still in a step; it ends with the process")
        if ctx.task is not None:
            try:
                ctx.save(settled=True)
            except StorageError as error:
                ctx.journal.warning(f"this stop will count as a crash: {error}")
        if ctx.link is not None:
            ctx.link.close(farewell=(ctx.topics.status(ctx.config.device), ctx.status(online=False)))
        ctx.journal.info("stopped")


STATES: Mapping[State, type[DeviceState]] = MappingProxyType(
    {
        State.STARTING: Starting,
        State.PROBING: Probing,
        State.IDLE: Idle,
        State.FETCHING: Fetching,
        State.TRAINING: Training,
        State.MEASURING: Measuring,
        State.UPLOADING: Uploading,
        State.REFUSING: Refusing,
        State.DROPPING: Dropping,
        State.STOPPED: Stopped,
    }
)
