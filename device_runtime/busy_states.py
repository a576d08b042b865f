"""The states of the agent that work on a task: fetching, training, measuring, uploading.

Each saves its name in the task record before it acts, posts events, and never chooses its successor.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from typing_extensions import override

from device_runtime.compute import Outcome, SelfTested, compute, needed_graphs
from device_runtime.context import Context, refusal_of
from device_runtime.fetching import Fetch
from device_runtime.machine import Event
from device_runtime.state_base import NEVER, DeviceState
from device_runtime.training import EpochReport, TaskStopped
from device_runtime.uploading import send_chunks
from device_runtime.work import Job, WorkDone, WorkFailed, WorkReport
from fleet_protocol.errors import RefusalReason, RefusedError, ShoalError, StorageError, TransportError
from fleet_protocol.manifest import parse_manifest
from fleet_protocol.messages import (
    Accept,
    BlobRef,
    Done,
    NeedChunks,
    Progress,
    Ranges,
    ServerMessage,
    UploadAck,
    UploadMissing,
    UploadRefused,
)

__all__ = ["Fetching", "Measuring", "Training", "Uploading"]

_PROGRESS_SECONDS = 0.5  # a tiny model finishes thousands of epochs a second; the server need not hear of each


class Fetching(DeviceState):
    """Collects the manifest, the graphs this board needs of it, and the weights."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self._fetch = Fetch(
            ctx.blobs,
            subscribe=ctx.subscribe_blob,
            unsubscribe=ctx.unsubscribe_blob,
            request=lambda digest, ranges: ctx.send(NeedChunks, digest=digest, ranges=ranges),
            repair_seconds=ctx.config.repair_seconds,
        )
        self._graphs: tuple[str, ...] | None = None
        self._made_room = False

    @override
    def enter(self) -> None:
        ctx = self.ctx
        task = ctx.need_task()
        try:
            ctx.save(phase="fetching", update=None, metrics=None)
        except StorageError as error:
            ctx.fail(error)
            return
        ctx.publish_status()
        self.on_repeat()
        choice = task.record.choice
        self._guarded(lambda: self._want(choice.artifact_set, choice.weights))

    @override
    def leave(self) -> None:
        self._fetch.close()

    @override
    def on_repeat(self) -> None:
        self.ctx.send(Accept, tier=self.ctx.need_task().record.tier)

    @override
    def on_chunk(self, digest: str, frame: bytes) -> None:
        if self._fetch.waits_for(digest):
            self._guarded(lambda: self._take(digest, frame))
        else:
            super().on_chunk(digest, frame)

    @override
    def on_wake(self) -> None:
        if not self.ctx.need_link().connected:
            self.wake_at = time.monotonic() + self.ctx.config.repair_seconds
            return
        count = self._fetch.repair(time.monotonic())
        self.ctx.journal.info(f"asked again for {count} blobs")
        self.wake_at = self._fetch.repair_at

    def _guarded(self, action: Callable[[], None]) -> None:
        """Fetch; when the disk is full, delete what no task uses and try once more before giving up."""
        ctx = self.ctx
        try:
            try:
                action()
            except StorageError as error:
                if self._made_room or refusal_of(error)[0] is not RefusalReason.NO_SPACE:
                    raise
                self._made_room = True
                freed = ctx.cache.evict(ctx.need_task().blobs_in_use(), everything=True)
                ctx.journal.warning(f"{error}; freed {freed} bytes of older blobs")
                action()
        except (ShoalError, OSError) as error:
            ctx.fail(error)

    def _take(self, digest: str, frame: bytes) -> None:
        if self._fetch.on_chunk(digest, frame, time.monotonic()) is not None:
            self.ctx.journal.info(f"fetched {digest[:12]}")
            self._advance()
        self.wake_at = self._fetch.repair_at

    def _want(self, *refs: BlobRef) -> None:
        self._fetch.want(refs, time.monotonic())
        self.wake_at = self._fetch.repair_at
        self._advance()

    def _advance(self) -> None:
        """Go on when the manifest, or everything, is there."""
        ctx, task = self.ctx, self.ctx.need_task()
        choice = task.record.choice
        if self._graphs is None and not self._fetch.waits_for(choice.artifact_set.digest):
            manifest = parse_manifest(ctx.blobs.read(choice.artifact_set.digest))
            if manifest.tier != choice.tier:
                raise RefusedError(
                    RefusalReason.MALFORMED, f"the offer says tier {choice.tier}, its manifest {manifest.tier}"
                )
            task.manifest = manifest
            self._graphs = needed_graphs(manifest, task.offer, ctx.need_bench())
            specs = [manifest.graphs[key] for key in self._graphs]
            chunk_bytes = choice.artifact_set.chunk_bytes
            self._want(*(BlobRef(digest=s.digest, size=s.size, chunk_bytes=chunk_bytes) for s in specs))
        elif self._graphs is not None and self._fetch.complete and not ctx.events:
            self._finish()

    def _finish(self) -> None:
        ctx, task = self.ctx, self.ctx.need_task()
        seconds = time.monotonic() - task.started
        task.fetch_seconds = seconds
        if self._fetch.received_bytes and seconds > 0:
            ctx.link_bytes_per_second = self._fetch.received_bytes / seconds
        choice, manifest = task.record.choice, task.manifest
        if manifest is not None and self._graphs is not None:
            digests = [manifest.graphs[key].digest for key in self._graphs]
            ctx.cache.used(choice.artifact_set.digest, digests, choice.weights.digest)
        ctx.journal.info(f"fetched everything: {self._fetch.received_bytes} bytes in {seconds:.2f} s")
        ctx.post(Event.FETCHED_STATISTICS if task.offer.kind == "statistics" else Event.FETCHED_TRAIN)


class _Computing(DeviceState):
    """A job in the worker thread turns the weights into an update."""

    phase = "training"

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self._epochs: EpochReport | None = None
        self._losses: list[float] = []
        self._told_at = -NEVER

    @override
    def enter(self) -> None:
        ctx = self.ctx
        task, bench = ctx.need_task(), ctx.need_bench()
        manifest = task.manifest
        if manifest is None:
            raise RuntimeError(f"the device in state {ctx.state.value!r} has no manifest; this is a bug")
        try:
            ctx.save(phase=self.phase)
        except StorageError as error:
            ctx.fail(error)
            return
        ctx.publish_status()
        digest = task.record.choice.artifact_set.digest
        tested = frozenset(name for entry in ctx.cache.index.sets if entry.manifest == digest for name in entry.tested)
        record, seconds = task.record, task.fetch_seconds

        def run(job: Job) -> Outcome:
            return compute(record, manifest, bench, tested, seconds, job)

        ctx.worker.start(self.phase, run)

    @override
    def leave(self) -> None:
        self.ctx.worker.cancel()

    @override
    def on_repeat(self) -> None:
        self.ctx.send(Accept, tier=self.ctx.need_task().record.tier)
        if self._epochs is not None:
            self._tell(self._epochs)

    def _tell(self, report: EpochReport) -> None:
        self._told_at = time.monotonic()
        self.ctx.send(Progress, epoch=report.epoch, epochs=report.epochs, step=report.step, loss=report.loss)

    @override
    def on_work(self, event: WorkReport | WorkDone | WorkFailed) -> None:
        ctx = self.ctx
        if isinstance(event, WorkFailed):
            if not isinstance(event.error, TaskStopped):
                ctx.fail(event.error)
        elif isinstance(event, WorkDone) and isinstance(event.result, Outcome):
            outcome = event.result
            metrics = outcome.metrics
            ctx.step_seconds = outcome.step_seconds or ctx.step_seconds
            if self._losses:
                ctx.remember_round(sum(self._losses) / len(self._losses))
            ctx.journal.info(
                f"computed {metrics.batches} batches in {metrics.train_seconds:.2f} s, loss={metrics.train_loss}"
            )
            try:
                ctx.save(phase="uploading", update=outcome.update, metrics=metrics)
            except StorageError as error:
                ctx.fail(error)
            else:
                ctx.post(Event.COMPUTED)
        elif isinstance(event, WorkReport):
            self._on_report(event.value)

    def _on_report(self, value: object) -> None:
        if isinstance(value, SelfTested):
            self.ctx.cache.mark_tested(self.ctx.need_task().record.choice.artifact_set.digest, value.name)
            self.ctx.journal.info(f"self-test passed: {value.name}")
        elif isinstance(value, EpochReport):
            first, self._epochs = self._epochs is None, value
            self._losses.append(value.loss)  # every epoch has all samples, so the mean of these is that of all steps
            due = time.monotonic() - self._told_at >= _PROGRESS_SECONDS
            if first or due or value.epoch == value.epochs:
                self.ctx.journal.info(f"epoch {value.epoch}/{value.epochs} step={value.step} loss={value.loss:.4f}")
                self._tell(value)


class Training(_Computing):
    """Local epochs, then evaluation on the held-out samples."""


class Measuring(_Computing):
    """The pass of a statistics task."""

    phase = "measuring"


class Uploading(DeviceState):
    """Sends the update and announces it until the server has it."""

    @override
    def enter(self) -> None:
        ctx, task = self.ctx, self.ctx.need_task()
        if task.record.update is None:
            raise RuntimeError("the device uploads without an update; this is a bug")
        ctx.publish_status()
        if task.resumed:
            # The server may have all of it already; Done makes it say what it misses.
            self._announce()
        else:
            self._send(((0, task.record.update.chunks),))

    @override
    def leave(self) -> None:
        self.ctx.worker.cancel()

    def _send(self, ranges: Ranges) -> None:
        ctx, task = self.ctx, self.ctx.need_task()
        update, name, link, topics = task.record.update, task.offer.task, ctx.need_link(), ctx.topics
        if update is None:
            return
        deadline = task.deadline
        self.wake_at = NEVER

        def run(job: Job) -> int:
            return send_chunks(
                link,
                ctx.blobs,
                update,
                ranges,
                lambda index: topics.upload(name, index),
                deadline=deadline,
                stopped=job.stopped,
            )

        ctx.worker.start("uploading", run)

    def _announce(self) -> None:
        record = self.ctx.need_task().record
        self.ctx.send(Done, update=record.update, tier=record.tier, metrics=record.metrics)
        self.wake_at = time.monotonic() + self.ctx.config.retry_seconds

    @override
    def on_repeat(self) -> None:
        if self.ctx.worker.current is None:
            self._announce()

    @override
    def on_wake(self) -> None:
        if self.ctx.need_link().connected:
            self.ctx.journal.info("announced the update again")
            self._announce()
        else:
            self.wake_at = time.monotonic() + self.ctx.config.retry_seconds

    @override
    def on_work(self, event: WorkReport | WorkDone | WorkFailed) -> None:
        if isinstance(event, WorkDone):
            self.ctx.journal.info(f"sent {event.result} chunks")
            self._announce()
        elif isinstance(event, WorkFailed) and isinstance(event.error, TransportError):
            self.ctx.post(Event.EXPIRED)
        elif isinstance(event, WorkFailed) and not isinstance(event.error, TaskStopped):
            self.ctx.fail(event.error)

    @override
    def on_message(self, message: ServerMessage) -> None:
        ctx = self.ctx
        if isinstance(message, UploadAck):
            ctx.journal.info("the server has the update")
            ctx.post(Event.ACKNOWLEDGED)
        elif isinstance(message, UploadRefused):
            ctx.journal.warning(f"the server refused the update: {message.reason.value}: {message.detail}")
            ctx.post(Event.REJECTED)
        elif isinstance(message, UploadMissing):
            if ctx.worker.current is None:  # else it answers an earlier Done; another follows when these are sent
                ctx.journal.info(f"the server misses chunks {message.ranges}")
                self._send(message.ranges)
        else:
            super().on_message(message)
