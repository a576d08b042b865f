"""Taking updates: chunks kept, a finished update checked, committed to the store and only then
acknowledged.

Updates that are accepted within one turn of the server's loop are synced side by side and committed
together.
"""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from broker_server.rounds.collecting import OpenTask
from broker_server.rounds.reporting import Reporter
from broker_server.service.clock import Clock
from broker_server.service.cohorts import Cohorts
from broker_server.service.outbox import Outbox
from broker_server.service.partial_uploads import QUIET_SECONDS, PartialUploads
from broker_server.service.receiver import Report, Word
from broker_server.service.receivers import Receivers
from broker_server.store import Store, TaskPhase
from broker_server.updates.checks import check_done
from broker_server.updates.values import Stored
from fleet_protocol.errors import BlobError, RefusalReason, RefusedError, StorageError
from fleet_protocol.messages import Done, UploadAck, UploadMissing
from fleet_protocol.transport import WireCount

_DAMAGED_UPLOADS = 2  # times that an update whose digest is wrong is asked for again


def refusal_of(detail: str | None) -> tuple[RefusalReason, str]:
    """The reason and text of a refusal as a task's detail keeps them."""
    name, _, text = (detail or "").partition(": ")
    try:
        return RefusalReason(name), text
    except ValueError:
        return RefusalReason.FAILED, detail or ""


class Uploads:
    """The server's side of every upload of a run."""

    def __init__(
        self,
        store: Store,
        partial: PartialUploads,
        outbox: Outbox,
        reporter: Reporter,
        clock: Clock,
        receivers: Receivers | None = None,
    ) -> None:
        self._store = store
        self._receivers = receivers
        self._partial = partial
        self._outbox = outbox
        self._reporter = reporter
        self.cohorts = Cohorts(store, partial.blobs, outbox, clock)
        self._payload_bytes = 0
        self._accepted: dict[str, tuple[OpenTask, Done, Stored]] = {}

    def open(self, tasks: Iterable[OpenTask]) -> None:
        """Give the receivers what is open, and nothing else."""
        self._partial.sent.cache_clear()
        if self._receivers is not None:
            self._receivers.open(task for task in tasks if not task.record.phase.answered)

    def turn(self, now: float) -> None:
        """Start receivers again that have died or hang."""
        for problem in self._receivers.turn(now) if self._receivers is not None else ():
            self._reporter.note("receiver-ended", problem)

    @property
    def wire(self) -> WireCount:
        """Bytes exchanged by receivers so far."""
        return WireCount(0, 0) if self._receivers is None else self._receivers.wire

    def chunk(self, task: OpenTask, frame: bytes) -> None:
        """Keep a chunk of an open task; a damaged one is counted and will be asked for again.

        Raises:
            StorageError: the server's disk is full.
        """
        if task.record.phase.answered or task.record.id in self._accepted:
            return  # the acknowledgement was lost and the device sends everything again
        try:
            self._partial.add(task.record.id, frame, task.limit_bytes)
        except RefusedError as error:
            self._count(task, error)
            return
        if task.announced is not None:
            task.quiet = time.monotonic() + QUIET_SECONDS
            if not self._partial.missing(task.record.id, task.announced.update):
                self.done(task, task.announced)

    def ask_for_missing(self, task: OpenTask) -> None:
        """Name the chunks of an announced update that have not come although the line is quiet."""
        if task.announced is not None and not task.record.phase.answered:
            missing = self._partial.missing(task.record.id, task.announced.update)
            self._outbox.tell(UploadMissing, task.record, ranges=missing)
        task.announced = None
        task.quiet = math.inf

    def done(self, task: OpenTask, message: Done) -> bool:
        """Take the announcement of a complete update of an open task from its device.

        Returns:
            True if the task is answered now, or with the next `commit`, and was not before.

        Raises:
            StorageError: the server's disk is full.
        """
        if task.record.phase.answered:
            self._repeat(task)
            return False
        if task.record.id in self._accepted:
            return False
        if task.take(message.tier):
            self._store.choose_tier(task.record)
        record = task.record
        try:
            check_done(message, task.expected)
            if self._receivers is not None:
                task.announced = message
                self._receivers.announced(record, message.update)
                return False
            if self._partial.missing(record.id, message.update):
                # Brokers keep the order of one topic only: the announcement may overtake the
                # chunks.
                task.announced, task.quiet = message, time.monotonic() + QUIET_SECONDS
                return False
            task.announced = None
            task.quiet = math.inf
            data = self._partial.finish(record.id, message.update)
        except BlobError as error:
            return self._damaged(task, message, str(error))
        except RefusedError as error:
            if error.reason is RefusalReason.WRONG_ROUND:
                # A message of another round under this task's name says nothing about the update of
                # this round, so the refusal names the round that the message named.
                self._count(task, error)
                named = replace(record, run=message.run, round=message.round)
                self._outbox.refuse(named, record.device, error.reason, str(error))
                return False
            return self._refuse(task, error)
        try:
            self.cohorts.expect(task)
            stored = self._partial.take(task, message.update, data)
        except RefusedError as error:
            return self._refuse(task, error)
        self._accepted[record.id] = (task, message, stored)
        return True

    def reported(self, report: Report, tasks: Mapping[str, OpenTask]) -> None:
        """Take what a receiver tells of open tasks; a StorageError where its disk is full."""
        if report.failed:
            raise StorageError(report.failed)
        for name in report.heard:
            if (heard := tasks.get(name)) is not None:
                heard.heard = time.monotonic()
        for word in report.words:
            task = tasks.get(word.task) if word.task is not None else None
            if word.kind == "counted":
                self._reporter.refused(
                    word.reason,
                    word.text,
                    device=None if task is None else task.record.device,
                    number=None if task is None else task.record.round,
                )
            elif (
                task is not None
                and (said := task.announced) is not None
                and said.update.digest == word.update
            ):
                self._heed(task, said, word)

    def _heed(self, task: OpenTask, message: Done, word: Word) -> None:
        """Do what follows from what became of an announced update; a repeated word finds none."""
        task.announced = None
        if task.record.phase.answered:
            return
        match word.kind:
            case "missing":
                self._outbox.tell(UploadMissing, task.record, ranges=word.ranges)
            case "damaged":
                self._damaged(task, message, word.text)
            case "refused":
                self._refuse(task, RefusedError(word.reason, word.text))
            case _:
                try:
                    self.cohorts.expect(task)
                except RefusedError as error:
                    self._refuse(task, error)
                else:
                    stored = Stored(word.merged, word.distance)
                    self._accepted[task.record.id] = (task, message, stored)

    def commit(self) -> None:
        """Put the updates accepted since the last call on the disk, commit them together, and
        acknowledge them.

        Raises:
            StorageError: the server's disk is full; none of them is acknowledged.
        """
        if not self._accepted:
            return
        accepted = [
            (task, task.record.with_update(stored.digest, done.update.size, done.metrics), done)
            for task, done, stored in self._accepted.values()
        ]
        for task, _, stored in self._accepted.values():
            task.distance = stored.distance
        self._accepted.clear()
        if self._receivers is None:  # which tell of what is on the disk
            self._partial.blobs.sync(
                {record.update_digest for _, record, _ in accepted if record.update_digest}
            )
        self._store.receive([record for _, record, _ in accepted])
        for task, record, message in accepted:
            task.record = record
            self._acknowledge(task)
            self._payload_bytes += message.update.size
            self._reporter.received(record, message.update, message.metrics)

    def _repeat(self, task: OpenTask) -> None:
        """Answer an announcement that was answered before, in the same way."""
        record = task.record
        if record.phase.arrived:
            self._acknowledge(task)
        elif record.phase is TaskPhase.REFUSED:
            reason, text = refusal_of(record.detail)
            self._outbox.refuse(record, record.device, reason, text)
        else:
            self._outbox.refuse(
                record,
                record.device,
                RefusalReason.LATE,
                "the server no longer waits for this update",
            )

    def _acknowledge(self, task: OpenTask) -> None:
        if (
            task.instructions.upload.summing is None
        ):  # else the device is needed until its sum is made
            self._outbox.tell(UploadAck, task.record)

    def _damaged(self, task: OpenTask, message: Done, detail: str) -> bool:
        task.damaged += 1
        error = RefusedError(
            RefusalReason.BAD_DIGEST,
            f"upload {task.damaged} of task {task.record.id}: {detail}",
        )
        if task.damaged > _DAMAGED_UPLOADS:
            return self._refuse(task, error)
        self._count(task, error)
        self._outbox.tell(UploadMissing, task.record, ranges=((0, message.update.chunks),))
        return False

    def _count(self, task: OpenTask, error: RefusedError) -> None:
        self._reporter.refused(
            error.reason,
            str(error),
            device=task.record.device,
            number=task.record.round,
        )

    def _refuse(self, task: OpenTask, error: RefusedError) -> bool:
        record = task.record
        self._partial.drop(record.id)
        detail = f"{error.reason.value}: {error}"
        self._store.settle([record.id], TaskPhase.REFUSED, detail)
        task.record = replace(record, phase=TaskPhase.REFUSED, detail=detail)
        self._count(task, error)
        self._outbox.refuse(record, record.device, error.reason, str(error))
        return True

    def forget(self, task: str) -> None:
        """Drop what has arrived of an update whose task is over."""
        self._partial.drop(task)

    def take_payload_bytes(self) -> int:
        """Bytes of the updates stored since the last call."""
        taken = self._payload_bytes
        self._payload_bytes = 0
        return taken
