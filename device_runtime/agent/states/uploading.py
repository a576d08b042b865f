"""The state of the agent that sends an update until the server has it."""

import time

from typing_extensions import override

from device_runtime.agent.context import Context
from device_runtime.agent.machine import Event
from device_runtime.agent.refusals import refused_error
from device_runtime.agent.states.base import NEVER, DeviceState
from device_runtime.agent.upload import SentChunks, Upload, send_chunks
from device_runtime.agent.worker import Job, WorkDone, WorkFailed, WorkReport
from device_runtime.training.hooks import TaskStopped
from device_runtime.training.update import mask
from fleet_protocol.chunk_sizes import PACKET_ROOM, smaller_chunks
from fleet_protocol.errors import (
    BrokerRefusedError,
    RefusalReason,
    RefusedError,
    ShoalError,
    StorageError,
    TransportError,
)
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
from fleet_protocol.refusals import PACKET_TOO_LARGE, explain
from fleet_protocol.topics import UploadTopic
from fleet_protocol.transport import Refused


class Uploading(DeviceState):
    """Sends the update and announces it until the server acknowledges it.

    An update that goes into a secure sum is masked first.
    """

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        task = ctx.need_task()
        # From the record on disk, which says whether a mask has been added before a restart.
        self._unmasked = task.member is not None and not task.record.masked

    @override
    def enter(self) -> None:
        ctx = self.ctx
        task = ctx.need_task()
        if task.record.update is None:
            raise RuntimeError("the device uploads without an update; this is a bug")
        ctx.announce_state()
        if task.record.masked:
            # The agent masks after it enters this state, so this is a restart. A second mask would
            # spoil the sum: the server removes the masks of one set of keys.
            ctx.fail(
                RefusedError(
                    RefusalReason.FAILED,
                    f"the update of task {task.offer.task} was masked for a secure sum before the"
                    " agent restarted, and the keys of the masks are lost; the sum goes on without"
                    " this device",
                )
            )
        elif self._unmasked:
            ctx.accept()  # after a restart, with keys that differ from the previous ones
            self._mask_and_send()
        elif task.resumed:
            # The server may have all of it already; after Done it names the chunks that it lacks.
            self._announce()
        else:
            self._send(((0, task.record.update.chunks),))

    @override
    def leave(self) -> None:
        self.ctx.services.worker.cancel()

    def _mask_and_send(self) -> None:
        """Mask the update and send it if the members of its sum are known; otherwise wait."""
        ctx = self.ctx
        task = ctx.need_task()
        update = task.record.update
        member = task.member
        if update is None or member is None or not member.partners or not self._unmasked:
            return
        try:
            masked = mask(ctx.services.blobs, update, member)
            # Saved on disk before the unmasked update is deleted.
            ctx.save(update=masked, masked=True)
            ctx.services.blobs.remove(update.digest)
        except ShoalError as error:
            ctx.fail(error)
            return
        self._unmasked = False
        self._send(((0, update.chunks),))

    def _send(self, ranges: Ranges, *, again: bool = False) -> None:
        """Send chunks in the worker thread, which announces the update after the last one."""
        ctx = self.ctx
        task = ctx.need_task()
        update = task.record.update
        if update is None:
            return
        task_id = task.offer.task
        link = ctx.uplink.need_link()
        topics = ctx.uplink.topics
        upload = Upload(update, ranges, lambda index: topics.upload(task_id, index), again)
        # The worker reports the end; until then an announcement would only name missing chunks.
        self.wake_at = NEVER

        def send(job: Job) -> SentChunks:
            return send_chunks(link, ctx.services.blobs, upload, stopped=job.stopped)

        ctx.services.worker.start("uploading", send)

    def _announce(self) -> None:
        task = self.ctx.need_task()
        self.ctx.send(
            Done,
            update=task.record.update,
            tier=task.announced_tier,
            metrics=task.record.metrics,
        )
        self.wake_at = time.monotonic() + self.ctx.services.config.retry_seconds

    @override
    def on_repeat(self) -> None:
        if self._unmasked:
            self.ctx.accept()
        elif self.ctx.services.worker.current is None:
            self._announce()

    @override
    def on_wake(self) -> None:
        if self.ctx.uplink.need_link().connected:
            self.ctx.services.journal.info("announced the update again")
            self._announce()
        else:
            self.wake_at = time.monotonic() + self.ctx.services.config.retry_seconds

    @override
    def on_work(self, event: WorkReport | WorkDone | WorkFailed) -> None:
        if isinstance(event, WorkDone) and isinstance(event.result, SentChunks):
            # Before the announcement, with which the device may already report the speed.
            self.ctx.measurements.link.note_upload(event.result.speed)
            self.ctx.services.journal.info(f"sent {event.result.count} chunks")
            self._announce()
        elif isinstance(event, WorkFailed) and isinstance(event.error, BrokerRefusedError):
            self._send_smaller()
        elif isinstance(event, WorkFailed) and isinstance(event.error, TransportError):
            self.ctx.post(Event.EXPIRED)
        elif isinstance(event, WorkFailed) and not isinstance(event.error, TaskStopped):
            self.ctx.fail(event.error)

    @override
    def on_refused(self, refused: Refused) -> None:
        ctx = self.ctx
        task = ctx.need_task()
        update = task.record.update
        topic = ctx.uplink.topics.parse(refused.topic)
        is_own = isinstance(topic, UploadTopic) and topic.task == task.offer.task
        if not is_own or update is None:
            return
        if refused.code != PACKET_TOO_LARGE:
            ctx.fail(refused_error(refused))
        elif (
            refused.packet_bytes <= _payload_bytes(update) + PACKET_ROOM
        ):  # otherwise the update has been cut into smaller chunks before
            self._send_smaller()

    def _send_smaller(self) -> None:
        """Cut the update into chunks smaller than the broker has refused, and send them."""
        ctx = self.ctx
        update = ctx.need_task().record.update
        if update is None:
            return
        link = ctx.uplink.need_link()
        payload_bytes = _payload_bytes(update)
        smaller = smaller_chunks(payload_bytes, link.packet_bytes)
        if smaller is None:
            ctx.fail(
                RefusedError(
                    RefusalReason.TOO_LARGE_FOR_BROKER,
                    f"the broker at {link.address} accepts no packet with {payload_bytes:,} "
                    f"bytes of an update of {update.size:,} bytes {explain(PACKET_TOO_LARGE)}",
                )
            )
            return
        ctx.services.journal.warning(
            f"the broker refuses chunks of {payload_bytes:,} bytes; sending the update in "
            f"chunks of {smaller:,} bytes"
        )
        try:
            ctx.save(update=update.model_copy(update={"chunk_bytes": smaller}))
        except StorageError as error:
            ctx.fail(error)
            return
        self._send(((0, -(-update.size // smaller)),))

    @override
    def on_message(self, message: ServerMessage) -> None:
        ctx = self.ctx
        if isinstance(message, UploadAck):
            ctx.services.journal.info("the server has the update")
            ctx.post(Event.ACKNOWLEDGED)
        elif isinstance(message, UploadRefused):
            ctx.services.journal.warning(
                f"the server refused the update: {message.reason.value}: {message.detail}"
            )
            ctx.post(Event.REJECTED)
        elif isinstance(message, UploadMissing):
            self._send_missing(message.ranges)
        else:
            super().on_message(message)
            if isinstance(message, Sum) and not ctx.events:
                self._mask_and_send()

    def _send_missing(self, ranges: Ranges) -> None:
        """Send the chunks that the server lacks.

        While chunks are being sent, the server answers an earlier Done; another Done follows after
        the last chunk.
        """
        if self.ctx.services.worker.current is None:
            self.ctx.services.journal.info(f"the server lacks chunks {ranges}")
            self._send(ranges, again=True)


def _payload_bytes(update: BlobRef) -> int:
    """Return the size in bytes of the largest chunk of an update."""
    return min(update.chunk_bytes, update.size)
