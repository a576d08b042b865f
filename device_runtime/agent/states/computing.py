"""The states of the agent in which its worker thread turns weights into an update."""

import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from typing_extensions import override

from device_runtime.agent.choosing import choose, remember_round
from device_runtime.agent.context import Context
from device_runtime.agent.machine import Event
from device_runtime.agent.states.base import DeviceState
from device_runtime.agent.worker import Job, WorkDone, WorkFailed, WorkReport
from device_runtime.training.backends.runtime import CPU
from device_runtime.training.compute import compute, time_step
from device_runtime.training.current_data import DataSeen, on_current_data
from device_runtime.training.hooks import (
    EpochReport,
    Hooks,
    SelfTested,
    Settled,
    TaskStopped,
)
from device_runtime.training.task import DeviceSetup, Task
from fleet_protocol.data.label_order import check_own_labels
from fleet_protocol.errors import DataError, StorageError
from fleet_protocol.messages import Progress

_LACKING = re.compile(
    "bad.alloc|[Ff]ailed to allocate memory"
)  # the errors of onnxruntime have no kinds
_PROGRESS_SECONDS = (
    1.0  # a tiny model finishes thousands of epochs a second; the server need not hear of each
)


class _Computing(DeviceState):
    """A job in the worker thread turns the weights into an update."""

    phase = "training"
    compute: Callable[[Task, DeviceSetup, Hooks], Any] = staticmethod(
        compute
    )  # in the worker thread

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self._epochs: EpochReport | None = None
        self._losses: list[float] = []
        self._told_at = time.monotonic()

    @override
    def enter(self) -> None:
        ctx = self.ctx
        task = ctx.need_task()
        setup = ctx.need_setup()
        manifest = task.manifest
        if manifest is None:
            raise RuntimeError(
                f"the device in state {ctx.state.value!r} has no manifest; this is a bug"
            )
        load = ctx.kit.memory.load(self.phase, task.record.tier, manifest.peak_memory_bytes)
        try:
            agreed = ctx.kit.agreement.of(setup.data, task.offer)
            if not task.offer.stays:  # otherwise the board may define its own labels
                check_own_labels(agreed.samples, manifest)
            ctx.save(phase=self.phase, load=load)
        except (DataError, StorageError) as error:
            ctx.fail(error)
            return
        ctx.tell_state()
        if task.record.crashes and setup.accelerators is not None:
            self._on_report(Settled(CPU, "the agent died in this task"))
            setup = replace(setup, accelerators=None)
        offer = task.offer
        tier = task.record.tier
        work = Task(
            run=offer.run,
            round=offer.round,
            id=offer.task,
            version=offer.version,
            tier=tier,
            instructions=offer,
            manifest=manifest,
            weights=task.record.choice.weights,
            tested=ctx.kit.cache.tested(task.record.choice.artifact_set.digest),
            fetch_seconds=task.fetch_seconds,
        )

        # The job removes both, so that memory does not hold both the old and the new samples.
        ready_setup = [replace(setup, data=agreed.samples)]
        ready_data = [agreed]

        def run(job: Job) -> object:
            hooks = Hooks(job.report, job.stopped)
            return on_current_data(self.compute, work, ready_setup.pop(), ready_data.pop(), hooks)

        ctx.kit.worker.start(self.phase, run)

    @override
    def leave(self) -> None:
        self.ctx.kit.worker.cancel()

    @override
    def on_repeat(self) -> None:
        self.ctx.accept()
        if self._epochs is not None:
            self._tell(self._epochs)

    def _tell(self, report: EpochReport) -> None:
        self._told_at = time.monotonic()
        loss = None if self.ctx.need_task().record.offer.upload.silent else report.loss
        self.ctx.send(
            Progress,
            epoch=report.epoch,
            epochs=report.epochs,
            step=report.step,
            loss=loss,
        )

    @override
    def on_work(self, event: WorkReport | WorkDone | WorkFailed) -> None:
        ctx = self.ctx
        load = ctx.need_task().record.load
        if isinstance(event, WorkFailed):
            if load is not None and (
                isinstance(event.error, MemoryError) or _LACKING.search(str(event.error))
            ):
                ctx.kit.memory.died(load, proven=True)
                event.error.__traceback__ = None  # its frames hold what the task had taken
            if not isinstance(event.error, TaskStopped):
                ctx.fail(event.error)
        elif isinstance(event, WorkDone):
            try:
                ctx.post(self._done(event.result))
            except StorageError as error:
                ctx.fail(error)
        elif isinstance(event, WorkReport):
            self._on_report(event.value)

    def _done(self, outcome: Any) -> Event:
        """Keep what was computed, and say what has happened by that.

        A StorageError where it cannot be kept.
        """
        ctx = self.ctx
        metrics = outcome.metrics
        ctx.kit.memory.lived(ctx.need_task().record.load, len(ctx.need_setup().data))
        ctx.measured.step_seconds = outcome.step_seconds or ctx.measured.step_seconds
        if self._losses:
            remember_round(
                ctx.need_task().record,
                ctx.kit.config,
                sum(self._losses) / len(self._losses),
            )
        ctx.kit.journal.info(
            f"computed {metrics.batches} batches in {metrics.train_seconds:.2f} s, loss={metrics.train_loss}"
        )
        ctx.save(phase="uploading", update=outcome.update, metrics=metrics)
        return Event.COMPUTED

    def _on_report(self, value: object) -> None:
        if isinstance(value, SelfTested):
            self.ctx.kit.cache.mark_tested(
                self.ctx.need_task().record.choice.artifact_set.digest, value.name
            )
            self.ctx.kit.journal.info(f"self-test passed: {value.name}")
        elif isinstance(value, Settled):
            self._losses.clear()  # what has begun on something else begins anew
            self.ctx.measured.provider = f"{value.provider} ({value.why})"
            self.ctx.kit.journal.info(f"trains on {self.ctx.measured.provider}")
        elif isinstance(value, DataSeen):
            self._take_data(value)
        elif isinstance(value, EpochReport):
            first = self._epochs is None
            self._epochs = value
            self._losses.append(
                value.loss
            )  # every epoch has all samples, so the mean of these is that of all steps
            due = time.monotonic() - self._told_at >= _PROGRESS_SECONDS
            if first or due or value.epoch == value.epochs:
                self.ctx.kit.journal.info(
                    f"epoch {value.epoch}/{value.epochs} step={value.step} loss={value.loss:.4f}"
                )
            if due:
                self._tell(value)

    def _take_data(self, seen: DataSeen) -> None:
        """Use the raw samples of changed files from now on, as another contract may need more of
        them.
        """
        ctx = self.ctx
        ctx.kit.agreement.renew(seen.data)
        ctx.setup = replace(ctx.need_setup(), data=seen.data.raw)
        if seen.changed:
            self._losses.clear()  # the task starts again
            ctx.kit.journal.warning(
                f"{seen.changed} changed: read again, {len(seen.data.raw)} samples"
            )
            ctx.publish_profile()  # sends the new findings before the update counts


class Training(_Computing):
    """Local epochs, then evaluation on the held-out samples."""


class Sizing(_Computing):
    """A few steps of the narrowest sub-model are timed, and the board chooses by that and by its
    link.
    """

    phase = "sizing"
    compute = staticmethod(time_step)

    @override
    def _done(self, outcome: Any) -> Event:
        ctx = self.ctx
        record = self.ctx.need_task().record
        link = self.ctx.measured.link_bytes_per_second
        tier = choose(record, ctx.kit.config, ctx.need_setup(), link, outcome)
        ctx.kit.journal.info(
            f"chose tier={tier}: {outcome:.4f} s a step of {record.tier}, {link or 0:.0f} B/s"
        )
        ctx.save(phase="fetching", tier=tier, chosen=True)
        return Event.SIZED

    @override
    def _on_report(self, value: object) -> None:
        if not isinstance(value, EpochReport):
            super()._on_report(value)


class Measuring(_Computing):
    """The pass of a statistics task."""

    phase = "measuring"
