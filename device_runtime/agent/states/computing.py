"""The states of the agent in which its worker thread computes an update from the weights."""

import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from typing_extensions import override

from device_runtime.agent.choosing import choose_tier, remember_round
from device_runtime.agent.context import Context
from device_runtime.agent.machine import Event
from device_runtime.agent.states.base import DeviceState
from device_runtime.agent.task_in_hand import TaskInHand
from device_runtime.agent.worker import Job, WorkDone, WorkFailed, WorkReport
from device_runtime.training.agreed_data import AgreedData
from device_runtime.training.backends.runtime import CPU
from device_runtime.training.compute import compute, time_step
from device_runtime.training.current_data import DataSeen, on_current_data
from device_runtime.training.hooks import (
    ChosenProvider,
    EpochReport,
    Hooks,
    SelfTested,
    TaskStopped,
)
from device_runtime.training.task import DeviceSetup, Task
from fleet_protocol.data.label_order import check_own_labels
from fleet_protocol.errors import DataError, StorageError
from fleet_protocol.manifest import Manifest
from fleet_protocol.messages import Progress

# onnxruntime's errors have no classes; these words occur in those about memory.
_OUT_OF_MEMORY = re.compile("bad.alloc|[Ff]ailed to allocate memory")
# A tiny model finishes thousands of epochs a second; the server does not need each of them.
_PROGRESS_SECONDS = 1.0


class _Computing(DeviceState):
    """A job in the worker thread computes an update from the weights.

    Attributes:
        phase: recorded in the task record meanwhile.
        compute: the function for the worker thread.
    """

    phase = "training"
    compute: Callable[[Task, DeviceSetup, Hooks], Any] = staticmethod(compute)

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self._last_report: EpochReport | None = None
        self._losses: list[float] = []
        self._progress_at = time.monotonic()

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
        load = ctx.services.memory.measure(self.phase, task.record.tier, manifest.peak_memory_bytes)
        try:
            agreed = ctx.services.agreement.apply(setup.data, task.offer)
            if not task.offer.board_defines_labels:
                check_own_labels(agreed.samples, manifest)
            # First on disk: if the computation kills the agent, the restart knows what was too
            # large.
            ctx.save(phase=self.phase, load=load)
        except (DataError, StorageError) as error:
            ctx.fail(error)
            return
        ctx.announce_state()
        if task.record.crashes and setup.accelerators is not None:
            self._on_report(ChosenProvider(CPU, "the agent died during this task"))
            setup = replace(setup, accelerators=None)
        self._start(self._work(task, manifest), replace(setup, data=agreed.samples), agreed)

    def _work(self, task: TaskInHand, manifest: Manifest) -> Task:
        """Return the task in the form that training uses."""
        offer = task.offer
        choice = task.record.choice
        return Task(
            run=offer.run,
            round=offer.round,
            id=offer.task,
            version=offer.version,
            tier=task.record.tier,
            instructions=offer,
            manifest=manifest,
            weights=choice.weights,
            tested=self.ctx.services.cache.tested(choice.artifact_set.digest),
            fetch_seconds=task.fetch_seconds,
        )

    def _start(
        self,
        work: Task,
        setup: DeviceSetup,
        agreed: AgreedData,
    ) -> None:
        """Start the job."""
        # The job removes both from these lists, so that memory does not hold the old samples beside
        # those that are read again.
        ready_setup = [setup]
        ready_data = [agreed]

        def run(job: Job) -> object:
            hooks = Hooks(job.report, job.stopped)
            return on_current_data(self.compute, work, ready_setup.pop(), ready_data.pop(), hooks)

        self.ctx.services.worker.start(self.phase, run)

    @override
    def leave(self) -> None:
        self.ctx.services.worker.cancel()

    @override
    def on_repeat(self) -> None:
        self.ctx.accept()
        if self._last_report is not None:
            self._send_progress(self._last_report)

    def _send_progress(self, report: EpochReport) -> None:
        self._progress_at = time.monotonic()
        silent = self.ctx.need_task().record.offer.upload.silent
        self.ctx.send(
            Progress,
            epoch=report.epoch,
            epochs=report.epochs,
            step=report.step,
            loss=None if silent else report.loss,
        )

    @override
    def on_work(self, event: WorkReport | WorkDone | WorkFailed) -> None:
        if isinstance(event, WorkFailed):
            self._on_failure(event.error)
        elif isinstance(event, WorkDone):
            try:
                self.ctx.post(self._finish(event.result))
            except StorageError as error:
                self.ctx.fail(error)
        else:
            self._on_report(event.value)

    def _on_failure(self, error: Exception) -> None:
        load = self.ctx.need_task().record.load
        out_of_memory = isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error))
        if load is not None and out_of_memory:
            self.ctx.services.memory.record_death(load, proven=True)
            error.__traceback__ = None  # its frames hold the job's data
        if not isinstance(error, TaskStopped):
            self.ctx.fail(error)

    def _finish(self, result: Any) -> Event:
        """Save what was computed, and return the resulting event.

        Raises:
            StorageError: it cannot be saved.
        """
        ctx = self.ctx
        record = ctx.need_task().record
        metrics = result.metrics
        ctx.services.memory.record_survival(record.load, len(ctx.need_setup().data))
        if result.step_seconds:
            ctx.measurements.step_seconds = result.step_seconds
        if self._losses:
            remember_round(record, ctx.services.config, sum(self._losses) / len(self._losses))
        ctx.services.journal.info(
            f"computed {metrics.batches} batches in {metrics.train_seconds:.2f} s, "
            f"loss={metrics.train_loss}"
        )
        if record.efficiency is not None:
            metrics = metrics.model_copy(update={"efficiency": record.efficiency})
        ctx.save(phase="uploading", update=result.update, masked=False, metrics=metrics)
        return Event.COMPUTED

    def _on_report(self, report: object) -> None:
        if isinstance(report, SelfTested):
            digest = self.ctx.need_task().record.choice.artifact_set.digest
            self.ctx.services.cache.mark_tested(digest, report.name)
            self.ctx.services.journal.info(f"self-test passed: {report.name}")
        elif isinstance(report, ChosenProvider):
            self._losses.clear()  # a task that began on another provider begins again
            self.ctx.measurements.provider = f"{report.provider} ({report.why})"
            self.ctx.services.journal.info(f"trains on {self.ctx.measurements.provider}")
        elif isinstance(report, DataSeen):
            self._adopt_data(report)
        elif isinstance(report, EpochReport):
            self._on_epoch(report)

    def _on_epoch(self, report: EpochReport) -> None:
        is_first = self._last_report is None
        self._last_report = report
        # Every epoch uses all samples, so the mean of these losses is that of all steps.
        self._losses.append(report.loss)
        due = time.monotonic() - self._progress_at >= _PROGRESS_SECONDS
        if is_first or due or report.epoch == report.epochs:
            self.ctx.services.journal.info(
                f"epoch {report.epoch}/{report.epochs} step={report.step} loss={report.loss:.4f}"
            )
        if due:
            self._send_progress(report)

    def _adopt_data(self, seen: DataSeen) -> None:
        """Use the samples of changed files from now on.

        The samples before conversion, because another contract may need more of them.
        """
        ctx = self.ctx
        ctx.services.agreement.renew(seen.data)
        ctx.setup = replace(ctx.need_setup(), data=seen.data.raw)
        if seen.changed:
            self._losses.clear()  # the task starts again
            ctx.services.journal.warning(
                f"{seen.changed} changed: read again, {len(seen.data.raw)} samples"
            )
            ctx.publish_profile()  # sends the new findings before the update counts


class Training(_Computing):
    """Local epochs, then evaluation on the held-out samples."""


class Sizing(_Computing):
    """Times a few steps of the narrowest sub-model; the board chooses by that and by its link."""

    phase = "sizing"
    compute = staticmethod(time_step)

    @override
    def _finish(self, result: Any) -> Event:
        ctx = self.ctx
        record = ctx.need_task().record
        link = ctx.measurements.link.sending_speed
        decision = choose_tier(record, ctx.services.config, ctx.need_setup(), link, result)
        ctx.services.journal.info(
            f"chose tier={decision.tier}: {result:.4f} s a step of {record.tier},"
            f" {link or 0:.0f} B/s"
        )
        ctx.save(phase="fetching", tier=decision.tier, chosen=True, efficiency=decision.efficiency)
        return Event.SIZED

    @override
    def _on_report(self, report: object) -> None:
        if not isinstance(report, EpochReport):
            super()._on_report(report)


class Measuring(_Computing):
    """The forward pass of a statistics task."""

    phase = "measuring"
