"""The states of the agent in which a task ends, and in which the agent ends."""

from typing_extensions import override

from device_runtime.agent.context import TaskOutcome
from device_runtime.agent.machine import Event
from device_runtime.agent.states.base import DeviceState
from fleet_protocol.errors import RefusalReason, StorageError
from fleet_protocol.messages import Refuse

_JOIN_SECONDS = 5.0


class _Ending(DeviceState):
    """Forgets the task; blobs that later tasks may use stay."""

    @override
    def enter(self) -> None:
        ctx = self.ctx
        task = ctx.need_task()
        ctx.services.worker.cancel()
        update = task.record.update
        # The record first: a crash after that leaves unused files instead of a task without its
        # files.
        ctx.services.store.clear()
        ctx.task = None
        ctx.failure = None
        if update is not None:
            ctx.services.blobs.remove(update.digest)
        sets_before = ctx.services.cache.index.sets
        ctx.services.cache.evict(ctx.blobs_in_use())
        if sets_before and not ctx.services.cache.index.sets:
            size = ctx.services.config.max_cache_bytes
            ctx.services.journal.warning(
                f"max_cache_bytes = {size} is smaller than one artifact set, which is "
                "therefore downloaded for every task"
            )
        ctx.post(Event.CLEARED)


class Refusing(_Ending):
    """Sends the server the reason for which the task ends on this board.

    A crash between the message and the deletion repeats the task after the restart, and with it the
    refusal.
    """

    @override
    def enter(self) -> None:
        ctx = self.ctx
        task = ctx.need_task()
        reason, detail = ctx.failure or (RefusalReason.FAILED, "unknown")
        ctx.services.journal.warning(f"refused: {reason.value}: {detail}")
        ctx.send(Refuse, reason=reason, detail=detail)
        ctx.outcomes.append(TaskOutcome(task.offer.task, Event.FAILED, (reason, detail)))
        super().enter()


class Dropping(_Ending):
    """Forgets the task without a message: it is merged, or no longer wanted."""


class Stopped(DeviceState):
    """Stops the worker, records that this was not a crash, and sends the farewell."""

    @override
    def enter(self) -> None:
        ctx = self.ctx
        # The worker ends between two steps, and a step may take longer than the wait.
        ctx.services.worker.cancel()
        if not ctx.services.worker.join(_JOIN_SECONDS):
            ctx.services.journal.warning(
                "the worker thread is still in a step; it ends with the process"
            )
        if ctx.task is not None:
            try:
                ctx.save(settled=True)
            except StorageError as error:
                ctx.services.journal.warning(f"this stop will count as a crash: {error}")
        if ctx.uplink.link is not None:
            ctx.uplink.link.close(farewell=ctx.uplink.farewell(ctx.state.value))
        ctx.services.journal.info("stopped")
