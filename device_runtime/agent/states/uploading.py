"""The state of the agent in which a finished update goes to the server."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from typing_extensions import override

from device_runtime.agent.context import Context
from device_runtime.agent.machine import Event
from device_runtime.agent.states.base import NEVER, DeviceState
from device_runtime.agent.worker import Job, WorkDone, WorkFailed, WorkReport
from device_runtime.training.hooks import TaskStopped
from device_runtime.training.update import mask
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.blobs import iter_chunks
from fleet_protocol.errors import ShoalError, TransportError
from fleet_protocol.messages import (
    BlobRef,
    Done,
    Ranges,
    ServerMessage,
    Sum,
    UploadAck,
    UploadMissing,
    UploadRefused,
)
from fleet_protocol.transport import SEND_WINDOW, Transport

_PATIENCE_SECONDS = (
    0.5  # between two looks at whether the upload is still wanted while the broker is away
)


@dataclass(frozen=True)
class Upload:
    """Chunks that are to be sent."""

    update: BlobRef  # the blob
    ranges: Ranges  # half-open ranges of chunk indices
    topic: Callable[[int], str]  # topic of a chunk index
    again: bool = False  # they were sent before, so that each shows now that it is right


def send_chunks(
    link: Transport, blobs: BlobStore, upload: Upload, *, stopped: Callable[[], bool]
) -> int:
    """Send some chunks, a window at a time, waiting out a broker that is away.

    The number of chunks sent.

    Raises:
        TaskStopped: ``stopped`` said so.
        BlobError: the update is no longer intact on disk.
    """
    count = 0
    update = upload.update
    data = blobs.read(update.digest)
    digests = upload.again and not link.authentic
    for index, frame in iter_chunks(data, update.chunk_bytes, upload.ranges, digests=digests):
        _wait(link, SEND_WINDOW - 1, stopped)
        link.publish(upload.topic(index), frame)
        count += 1
    # Some brokers keep no order between topics: what is announced next should find the chunks
    # there.
    _wait(link, 0, stopped)
    return count


def _wait(link: Transport, unacknowledged: int, stopped: Callable[[], bool]) -> None:
    while not stopped():
        with contextlib.suppress(TransportError):
            link.drain(time.monotonic() + _PATIENCE_SECONDS, unacknowledged)
            return
    raise TaskStopped


class Uploading(DeviceState):
    """Sends the update and announces it until the server has it.

    One that goes into a secure sum is masked before.
    """

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self._bare = ctx.need_task().member is not None

    @override
    def enter(self) -> None:
        ctx = self.ctx
        task = self.ctx.need_task()
        if task.record.update is None:
            raise RuntimeError("the device uploads without an update; this is a bug")
        ctx.tell_state()
        if self._bare:
            ctx.accept()  # after a restart with other keys than before
            self._mask()
        elif task.resumed:
            # The server may have all of it already; Done makes it say what it misses.
            self._announce()
        else:
            self._send(((0, task.record.update.chunks),))

    @override
    def leave(self) -> None:
        self.ctx.kit.worker.cancel()

    def _mask(self) -> None:
        """Mask the update and send it, as soon as the others have dealt shares.

        Until then this state waits.
        """
        ctx = self.ctx
        task = self.ctx.need_task()
        update = task.record.update
        member = task.member
        if update is None or member is None or not member.dealt or not self._bare:
            return
        try:
            masked = mask(ctx.kit.blobs, update, member)
            ctx.save(update=masked)  # on disk before the update without masks goes
            ctx.kit.blobs.remove(update.digest)
        except ShoalError as error:
            ctx.fail(error)
        else:
            self._bare = False
            self._send(((0, update.chunks),))

    def _send(self, ranges: Ranges, *, again: bool = False) -> None:
        ctx = self.ctx
        task = self.ctx.need_task()
        update = task.record.update
        name = task.offer.task
        link = ctx.uplink.need()
        topics = ctx.uplink.topics
        if update is None:
            return
        upload = Upload(update, ranges, lambda index: topics.upload(name, index), again)
        self.wake_at = NEVER

        def run(job: Job) -> int:
            return send_chunks(link, ctx.kit.blobs, upload, stopped=job.stopped)

        ctx.kit.worker.start("uploading", run)

    def _announce(self) -> None:
        task = self.ctx.need_task()
        self.ctx.send(
            Done,
            update=task.record.update,
            tier=task.tier_said,
            metrics=task.record.metrics,
        )
        self.wake_at = time.monotonic() + self.ctx.kit.config.retry_seconds

    @override
    def on_repeat(self) -> None:
        if self._bare:
            self.ctx.accept()
        elif self.ctx.kit.worker.current is None:
            self._announce()

    @override
    def on_wake(self) -> None:
        if self.ctx.uplink.need().connected:
            self.ctx.kit.journal.info("announced the update again")
            self._announce()
        else:
            self.wake_at = time.monotonic() + self.ctx.kit.config.retry_seconds

    @override
    def on_work(self, event: WorkReport | WorkDone | WorkFailed) -> None:
        if isinstance(event, WorkDone):
            self.ctx.kit.journal.info(f"sent {event.result} chunks")
            self._announce()
        elif isinstance(event, WorkFailed) and isinstance(event.error, TransportError):
            self.ctx.post(Event.EXPIRED)
        elif isinstance(event, WorkFailed) and not isinstance(event.error, TaskStopped):
            self.ctx.fail(event.error)

    @override
    def on_message(self, message: ServerMessage) -> None:
        ctx = self.ctx
        if isinstance(message, UploadAck):
            ctx.kit.journal.info("the server has the update")
            ctx.post(Event.ACKNOWLEDGED)
        elif isinstance(message, UploadRefused):
            ctx.kit.journal.warning(
                f"the server refused the update: {message.reason.value}: {message.detail}"
            )
            ctx.post(Event.REJECTED)
        elif isinstance(message, UploadMissing):
            if (
                ctx.kit.worker.current is None
            ):  # else it answers an earlier Done; another follows when these are sent
                ctx.kit.journal.info(f"the server misses chunks {message.ranges}")
                self._send(message.ranges, again=True)
        else:
            super().on_message(message)
            if isinstance(message, Sum) and not ctx.events:
                self._mask()
