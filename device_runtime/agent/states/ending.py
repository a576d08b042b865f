"""The states of the agent in which a task ends, and in which it ends itself."""

from typing_extensions import override

from device_runtime.agent.context import TaskOutcome
from device_runtime.agent.machine import Event
from device_runtime.agent.states.base import DeviceState
from fleet_protocol.errors import RefusalReason, StorageError
from fleet_protocol.messages import Refuse

_JOIN_SECONDS = 5.0


class _Ending(DeviceState):
    """Forgets the task; blobs worth keeping stay."""

    @override
    def enter(self) -> None:
        ctx = self.ctx
        task = ctx.need_task()
        ctx.services.worker.cancel()
        update = task.record.update
        # The record first: a crash after it leaves files that nobody needs, and not a task without
        # its files.
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
                f"max_cache_bytes = {size} is less than one set takes: it is fetched for every task"
            )
        ctx.post(Event.CLEARED)


class Refusing(_Ending):
    """Tells the server why the task ends here.

    A crash between message and forgetting repeats the task after the restart, and with it the
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
    """Forgets the task without a word: it is merged, or nobody wants it any more."""


class Stopped(DeviceState):
    """Ends the worker, notes that this was no crash, and says good-bye."""

    @override
    def enter(self) -> None:
        ctx = self.ctx
        # It ends between two steps; a step may take longer than anybody waits.
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
