"""The server's desk: one inbox, and every event in it put where it belongs, one at a time, with deadlines.

All waiting of a run happens in `Desk.pump`. While it waits, chunks that devices ask for are published, offers are sent
again to devices that came back or stay silent, and uploads are taken.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from broker_server.blob_service import BlobService
from broker_server.collecting import Collection, OpenTask, due_for_nudge
from broker_server.fleet import Fleet
from broker_server.post import Post
from broker_server.reporting import Reporter
from broker_server.store import Store, TaskPhase, TaskRecord
from broker_server.uploads import Uploads
from fleet_protocol import control
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.link import Connected, Disconnected, Event, Received
from fleet_protocol.messages import (
    Accept,
    BlobRef,
    DeviceMessage,
    Done,
    NeedChunks,
    Progress,
    Refuse,
    parse_device_message,
    parse_status,
)
from fleet_protocol.topics import Topics

__all__ = ["Desk", "Stop", "StopRequested"]

PATIENCE_SECONDS = 1.0  # longest single wait, so that a request to stop is noticed
CROSSING_SECONDS = 1.0  # a device that says it is idle has this long to answer an offer that is under way

_IDLE = "idle"  # state of a device that works on nothing, as its status says
_NO_BLOB = BlobRef(digest="0" * 64, size=1, chunk_bytes=1024)


@dataclass(frozen=True)
class Stop:
    """Put into the inbox to end the loop."""


class StopRequested(Exception):  # noqa: N818  (not an error: the operator wants the server to end)
    """The server was asked to end; its run goes on when it is started again."""


class Desk:
    """Where everything that reaches the server during a run is handled.

    Args:
        inbox: events of the link.
        stopping: set when the server shall end.
        topics: of the fleet.
        store: the store.
        fleet: presence of the devices; shared between runs.
        blobs: publishes what devices ask for.
        uploads: takes what they send.
        post: answers them.
        reporter: tells about it.
        nudge_seconds: see `RoundConfig`.
        on_disconnect: called when the broker is gone; restarts an embedded one.
        on_control: called with a request of the command line.
    """

    def __init__(
        self,
        *,
        inbox: queue.SimpleQueue[Event | Stop],
        stopping: threading.Event,
        topics: Topics,
        store: Store,
        fleet: Fleet,
        blobs: BlobService,
        uploads: Uploads,
        post: Post,
        reporter: Reporter,
        nudge_seconds: float,
        on_disconnect: Callable[[], None],
        on_control: Callable[[bytes], None],
    ) -> None:
        self._inbox = inbox
        self._stopping = stopping
        self._topics = topics
        self._store = store
        self.fleet = fleet
        self.blobs = blobs
        self._uploads = uploads
        self.post = post
        self.reporter = reporter
        self._nudge_seconds = nudge_seconds
        self._on_disconnect = on_disconnect
        self._on_control = on_control
        self._collection: Collection | None = None
        self._count_at = 0.0

    # Waiting.

    def pump(self, until: float) -> None:
        """Handle one event, or what is due, and return.

        Args:
            until: ``time.monotonic()`` to wait for at most.

        Raises:
            StopRequested: the server shall end.
            StorageError: its disk is full.
        """
        if self._stopping.is_set():
            raise StopRequested
        now = time.monotonic()
        wake = min(until, now + PATIENCE_SECONDS, self.blobs.next_due() or until, self._next_quiet())
        try:
            event = self._inbox.get(timeout=max(0.0, wake - now))
        except queue.Empty:
            pass
        else:
            self._handle(event)
        self._do_what_is_due(time.monotonic())

    def _do_what_is_due(self, now: float) -> None:
        for problem in self.blobs.flush(now):
            self.reporter.note("blob-delayed", problem)
        for task in self._collection.unanswered if self._collection is not None else ():
            if task.quiet <= now:
                self._uploads.ask_for_missing(task)
            if due_for_nudge(task, now, self._nudge_seconds):
                self._offer(task)
        if now >= self._count_at:
            self._count_at = now + PATIENCE_SECONDS
            self.reporter.count()

    def _next_quiet(self) -> float:
        return (
            min((task.quiet for task in self._collection.unanswered), default=math.inf)
            if self._collection is not None
            else math.inf
        )

    def _handle(self, event: Event | Stop) -> None:
        if isinstance(event, Stop):
            raise StopRequested
        if isinstance(event, Connected):
            self.post.status(self.reporter.run)
            if not event.session_present:
                self.offer_again()
        elif isinstance(event, Disconnected):
            self.reporter.note("broker-lost", f"the connection to the broker is gone: {event.reason}")
            self._on_disconnect()
        else:
            self._route(event)

    def _route(self, event: Received) -> None:
        try:
            parts = self._topics.parts(event.topic)
            if len(parts) == 3 and parts[0] == "devices" and parts[2] == "status":
                self._status(parts[1], event.payload)
            elif len(parts) == 3 and parts[0] == "devices" and parts[2] == "reply":
                self._reply(parts[1], event.payload)
            elif len(parts) == 3 and parts[0] == "uploads":
                self._chunk(parts[1], event.payload)
            elif parts == ("server", "control"):
                self._on_control(event.payload)
        except RefusedError as error:
            device = parts[1] if parts[0] == "devices" else None
            self.reporter.refused(error.reason, str(error), device=device, number=self._number)

    @property
    def _number(self) -> int | None:
        return self._collection.number if self._collection is not None else None

    # Presence.

    def _status(self, device: str, payload: bytes) -> None:
        status = parse_status(payload)
        if (status.fleet, status.device) != (self._topics.fleet, device):
            raise RefusedError(
                RefusalReason.UNKNOWN_DEVICE,
                f"a status of {status.device} in fleet {status.fleet} came on the topic of {device}",
            )
        changed = self.fleet.see(status)
        self._store.see_device(status)
        if not status.online:
            self.blobs.forget(device)
        elif self._collection is not None:
            for task in self._collection.of_device(device):
                if changed:
                    self._offer(task)
                elif status.state == _IDLE:
                    # Either our offer and this message have crossed, or a broker's restart swallowed the offer.
                    due = time.monotonic() - self._nudge_seconds + CROSSING_SECONDS
                    task.offered, task.heard = min(task.offered, due), min(task.heard, due)

    # Offers.

    def open(self, collection: Collection) -> None:
        """Begin to collect: offer every task that is not answered and whose device is there.

        Args:
            collection: replaces the one before.
        """
        self._collection = collection
        self.offer_again()

    def close(self, reason: str) -> None:
        """End the collection; devices that still work on it are told.

        Args:
            reason: for their log.
        """
        collection, self._collection = self._collection, None
        for task in collection.unanswered if collection is not None else ():
            self.post.cancel(task.record, reason)

    def offer_again(self) -> None:
        """Send every open offer once more."""
        if self._collection is not None:
            for task in self._collection.unanswered:
                self._offer(task)

    def _offer(self, task: OpenTask) -> None:
        collection = self._collection
        now = time.monotonic()
        if collection is None or not self.fleet.is_online(task.record.device) or now >= collection.deadline:
            return
        weights = task.record.weights.digest
        if task.offered < 0 and not self.blobs.asked(weights, task.record.device):
            self.blobs.expect(weights, task.record.device)
        task.offered = now
        self.post.offer(task.record, collection.train, collection.deadline - now)

    # Replies.

    def _reply(self, device: str, payload: bytes) -> None:
        message = parse_device_message(payload)
        if (message.fleet, message.device) != (self._topics.fleet, device) or not self.fleet.knows(device):
            if isinstance(message, Done):
                self.post.refuse(self._as_named(message), device, RefusalReason.UNKNOWN_DEVICE, "announce yourself")
            raise RefusedError(
                RefusalReason.UNKNOWN_DEVICE,
                f"{message.type} of {message.device} in fleet {message.fleet}, sent by {device}, "
                "which has not announced itself under this name",
            )
        if isinstance(message, NeedChunks):
            self._need(message)
            return
        task = self._collection.tasks.get(message.task) if self._collection is not None else None
        if task is None:
            self._not_open(message)
            return
        if task.record.device != device:
            if isinstance(message, Done):
                self.post.refuse(task.record, device, RefusalReason.UNKNOWN_DEVICE, "this task is another device's")
            raise RefusedError(
                RefusalReason.UNKNOWN_DEVICE, f"{message.type} for task {message.task} of {task.record.device}"
            )
        task.heard = time.monotonic()
        if isinstance(message, Done):
            self._uploads.done(task, message)
        elif (message.run, message.round) != (task.record.run, task.record.round):
            raise RefusedError(
                RefusalReason.WRONG_ROUND, f"{message.type} for round {message.round}, not {task.record.round}"
            )
        else:
            self._about(task, message)

    def _need(self, message: NeedChunks) -> None:
        task = self._collection.tasks.get(message.task) if self._collection is not None else None
        if task is not None:
            task.heard = time.monotonic()
        if not self.blobs.need(message):
            known = self._store.task(message.task)
            reason = RefusalReason.UNKNOWN_TASK if known is None else RefusalReason.LATE
            raise RefusedError(reason, f"blob {message.digest[:12]} of task {message.task} is not offered")

    def _about(self, task: OpenTask, message: Accept | Progress | Refuse) -> None:
        record, run, seconds = task.record, self.reporter.run, self.reporter.seconds
        if isinstance(message, Accept):
            self.reporter.emit(
                control.DeviceAccepted(
                    run=run,
                    seconds=seconds,
                    round=record.round,
                    device=record.device,
                    kind=record.kind,
                    tier=message.tier,
                )
            )
        elif isinstance(message, Progress):
            self.reporter.emit(
                control.DeviceProgressed(
                    run=run,
                    seconds=seconds,
                    round=record.round,
                    device=record.device,
                    epoch=message.epoch,
                    epochs=message.epochs,
                    step=message.step,
                    loss=message.loss,
                )
            )
        elif not record.phase.answered:
            detail = f"{message.reason.value}: {message.detail}"
            self._store.settle([record.id], TaskPhase.DECLINED, detail)
            task.record = replace(record, phase=TaskPhase.DECLINED, detail=detail)
            self.reporter.refused(
                message.reason, message.detail, device=record.device, number=record.round, by_device=True
            )

    def _not_open(self, message: DeviceMessage) -> None:
        """Answer a message about a task that is over, or that never was."""
        known = self._store.task(message.task)
        named = known or self._as_named(message)
        if known is not None and known.device == message.device and isinstance(message, Done):
            if known.phase in {TaskPhase.RECEIVED, TaskPhase.MERGED}:
                self.post.acknowledge(known)  # the first acknowledgement was lost
                return
            detail = f"round {known.round} is over"
            self.post.refuse(known, message.device, RefusalReason.LATE, detail)
            raise RefusedError(RefusalReason.LATE, f"update for task {message.task}: {detail}")
        if known is not None and known.device == message.device:
            self.post.cancel(known, f"round {known.round} is over")
            return
        reason = RefusalReason.UNKNOWN_TASK if known is None else RefusalReason.UNKNOWN_DEVICE
        if isinstance(message, Done):
            self.post.refuse(named, message.device, reason, "there is no such task for this device")
        raise RefusedError(reason, f"{message.type} for task {message.task}")

    def _as_named(self, message: DeviceMessage) -> TaskRecord:
        """A task as a message names it, to answer in its words."""
        return TaskRecord(
            id=message.task,
            run=message.run,
            round=message.round,
            device=message.device,
            kind="train",
            tier="",
            plan_key="",
            version=0,
            artifact_set=_NO_BLOB,
            weights=_NO_BLOB,
        )

    # Uploads.

    def _chunk(self, task_id: str, frame: bytes) -> None:
        collection = self._collection
        task = collection.tasks.get(task_id) if collection is not None else None
        if task is not None:
            task.heard = time.monotonic()
            self._uploads.chunk(task, frame)
            return
        strangers = collection.strangers if collection is not None else set()
        if task_id not in strangers:
            strangers.add(task_id)
            known = self._store.task(task_id)
            reason = RefusalReason.UNKNOWN_TASK if known is None else RefusalReason.LATE
            raise RefusedError(reason, f"chunks of task {task_id}, which is not open")
