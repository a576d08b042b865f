"""Answers for the updates of a run: stored ones are committed, and only then acknowledged.

`broker_server.service.reassembly` makes updates from chunks, in the server or in its receivers.
This module handles the outcomes, and never holds the bytes of an update. Updates that are accepted
within one turn of the server's loop are synced side by side and committed together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from broker_server.rounds.collecting import OpenTask
from broker_server.rounds.reporting import Reporter
from broker_server.service.cohorts import Cohorts
from broker_server.service.outbox import Outbox
from broker_server.service.reassembly import Reassembly, UploadOutcome
from broker_server.service.receiver_messages import Report
from broker_server.service.receivers import Receivers
from broker_server.store import Store, TaskPhase
from broker_server.updates.checks import check_done
from broker_server.updates.values import StoredUpdate
from fleet_protocol.errors import RefusalReason, RefusedError, StorageError
from fleet_protocol.messages import Done, UploadAck, UploadMissing
from fleet_protocol.transport import WireCount

_DAMAGED_UPLOADS = 2  # number of times that an update with a wrong digest is requested again


def parse_refusal(detail: str | None) -> tuple[RefusalReason, str]:
    """Return the reason and text of a refusal in the form of a stored task's detail."""
    name, _, text = (detail or "").partition(": ")
    try:
        return RefusalReason(name), text
    except ValueError:
        return RefusalReason.FAILED, detail or ""


@dataclass(frozen=True)
class _Accepted:
    """An update that is stored, but not committed and acknowledged yet."""

    task: OpenTask
    message: Done
    stored: StoredUpdate


@dataclass
class Uploads:
    """The answers to every upload of a run.

    Attributes:
        store: the server's database.
        reassembly: holds the chunks; receivers, if there are any, each have a separate one.
        outbox: sends messages to devices.
        reporter: reports the run.
        cohorts: the secure sums that updates go into.
        receivers: the processes that receive updates for the server, if any.
    """

    store: Store
    reassembly: Reassembly
    outbox: Outbox
    reporter: Reporter
    cohorts: Cohorts
    receivers: Receivers | None = None
    _payload_bytes: int = field(default=0, init=False)
    _accepted: dict[str, _Accepted] = field(default_factory=dict, init=False)

    def set_open_tasks(self, tasks: Mapping[str, OpenTask]) -> None:
        """Receive updates of these tasks from now on, by id, and of no others."""
        # Weights that were sent in an earlier round would otherwise stay mapped as long as the
        # server runs.
        self.reassembly.partial.sent.cache_clear()
        self.reassembly.keep_only(tasks)
        if self.receivers is not None:
            self.receivers.assign(task for task in tasks.values() if not task.record.phase.answered)

    def restart_failed_receivers(self, now: float) -> None:
        """Restart receivers that have died or hang."""
        if self.receivers is None:
            return
        for problem in self.receivers.restart_failed(now):
            self.reporter.note("receiver-ended", problem)

    @property
    def wire(self) -> WireCount:
        """Bytes exchanged by receivers so far."""
        return WireCount(0, 0) if self.receivers is None else self.receivers.wire

    # Announcements.

    def next_due(self) -> float:
        """Return the ``time.monotonic()`` at which missing chunks are requested."""
        return self.reassembly.next_due()

    def ask_for_missing(self, now: float) -> None:
        """Request the missing chunks of announced updates that have been quiet for a while."""
        for missing in self.reassembly.pop_overdue(now):
            # The device sends the chunks, then announces again: the earlier announcement is over.
            task = missing.task
            task.announced = None
            if not task.record.phase.answered:
                self.outbox.send_about(UploadMissing, task.record, ranges=missing.ranges)

    def receive_announcement(self, task: OpenTask, message: Done) -> None:
        """Receive the announcement of a complete update of an open task from its device.

        Raises:
            StorageError: the server's disk is full.
        """
        # A lost acknowledgement: the device announces until it gets one.
        if task.record.phase.answered:
            self._repeat_answer(task)
            return
        if task.record.id in self._accepted:
            return  # acknowledged with the next commit
        # The device has chosen among the offered tiers, and is merged as the tier that it trained.
        # Before the checks, which are those of the tier that it took.
        if task.choose_tier(message.tier):
            self.store.choose_tier(task.record)
        try:
            # An update that the announcement shows to be wrong is refused before any chunk is
            # awaited.
            check_done(message, task.expected)
        except RefusedError as error:
            if error.reason is RefusalReason.WRONG_ROUND:
                self._refuse_other_round(task, message, error)
            else:
                self._refuse(task, error)
            return
        task.announced = message
        if self.receivers is not None:
            self.receivers.announce(task.record, message.update)
            return
        outcome = self.reassembly.announce(task, message.update)
        if outcome is not None:
            self.apply_outcome(task, outcome)

    def _refuse_other_round(self, task: OpenTask, message: Done, error: RefusedError) -> None:
        """Refuse an announcement of another round under this task's id.

        It says nothing about the update of this round, which may still arrive. The refusal names
        the round that the announcement named.
        """
        self._count(task, error)
        # The device compares both with its current task.
        record = replace(task.record, run=message.run, round=message.round)
        self.outbox.refuse(record, record.device, error.reason, str(error))

    # Outcomes.

    def apply_report(self, report: Report, tasks: Mapping[str, OpenTask]) -> None:
        """Apply a receiver's report on open tasks.

        Raises:
            StorageError: the receiver's disk is full.
        """
        # A receiver's full disk is the server's: they share the store.
        if report.failed:
            raise StorageError(report.failed)
        for outcome in report.outcomes:
            # A task may have ended while its receiver worked, and then nobody waits for the
            # outcome.
            task = None if outcome.task is None else tasks.get(outcome.task)
            if task is not None:
                self.apply_outcome(task, outcome)
            elif outcome.kind == "counted":
                self.reporter.refused(outcome.reason, outcome.detail, device=None, number=None)

    def apply_outcome(self, task: OpenTask, outcome: UploadOutcome) -> None:
        """Answer an announced update of an open task, or count a refused chunk of it."""
        if outcome.kind == "counted":
            self._count(task, RefusedError(outcome.reason, outcome.detail))
            return
        message = task.announced
        # Another update was announced since, or the outcome was applied already.
        if message is None or message.update.digest != outcome.update:
            return  # a repeated report
        task.announced = None
        if not task.record.phase.answered:
            self._answer(task, message, outcome)

    def _answer(self, task: OpenTask, message: Done, outcome: UploadOutcome) -> None:
        match outcome.kind:
            case "missing":
                self.outbox.send_about(UploadMissing, task.record, ranges=outcome.ranges)
            case "damaged":
                self._handle_damage(task, message, outcome.detail)
            case "refused":
                self._refuse(task, RefusedError(outcome.reason, outcome.detail))
            case "stored":
                self._accept(task, message, StoredUpdate(outcome.merged, outcome.distance))

    def _accept(self, task: OpenTask, message: Done, stored: StoredUpdate) -> None:
        try:
            self.cohorts.require_due(task)
        except RefusedError as error:
            # No other update has these bytes, which name their task.
            self.reassembly.partial.blobs.remove(stored.digest)
            self._refuse(task, error)
            return
        self._accepted[task.record.id] = _Accepted(task, message, stored)

    # Answers.

    def commit(self) -> None:
        """Sync the updates accepted since the last call, commit them together, acknowledge them.

        Raises:
            StorageError: the server's disk is full; no update is acknowledged.
        """
        if not self._accepted:
            return
        # Emptied first: what cannot be synced or committed now is announced again by its device.
        batch = list(self._accepted.values())
        self._accepted.clear()
        records = []
        for accepted in batch:
            update = accepted.message.update
            metrics = accepted.message.metrics
            record = accepted.task.record.with_update(accepted.stored.digest, update.size, metrics)
            records.append(record)
            accepted.task.distance = accepted.stored.distance
        # The order matters: first on disk, then in the database, and only then acknowledged.
        if self.receivers is None:  # they report what is already on disk
            digests = {record.update_digest for record in records if record.update_digest}
            self.reassembly.partial.blobs.sync(digests)
        self.store.receive(records)
        for accepted, record in zip(batch, records, strict=True):
            # The task in memory follows the database, never the other way.
            accepted.task.record = record
            self._acknowledge(accepted.task)
            self._payload_bytes += accepted.message.update.size
            self.reporter.received(record, accepted.message.update, accepted.message.metrics)

    def _repeat_answer(self, task: OpenTask) -> None:
        """Answer an announcement that was answered before, in the same way."""
        record = task.record
        # After a restart of the server, too: the phase comes from the store.
        if record.phase.arrived:
            self._acknowledge(task)
        elif record.phase is TaskPhase.REFUSED:
            reason, text = parse_refusal(record.detail)
            self.outbox.refuse(record, record.device, reason, text)
        else:
            self.outbox.refuse(
                record,
                record.device,
                RefusalReason.LATE,
                "the server no longer waits for this update",
            )

    def _acknowledge(self, task: OpenTask) -> None:
        # An acknowledged device drops its task, but one in a secure sum still has shares to reveal.
        if task.instructions.upload.summing is None:
            self.outbox.send_about(UploadAck, task.record)

    def _handle_damage(self, task: OpenTask, message: Done, detail: str) -> None:
        """Request a damaged update again, or refuse it."""
        task.damaged += 1
        error = RefusedError(
            RefusalReason.BAD_DIGEST,
            f"upload {task.damaged} of task {task.record.id}: {detail}",
        )
        if task.damaged > _DAMAGED_UPLOADS:
            self._refuse(task, error)
            return
        self._count(task, error)
        self.outbox.send_about(UploadMissing, task.record, ranges=((0, message.update.chunks),))

    def _count(self, task: OpenTask, error: RefusedError) -> None:
        self.reporter.refused(
            error.reason,
            str(error),
            device=task.record.device,
            number=task.record.round,
        )

    def _refuse(self, task: OpenTask, error: RefusedError) -> None:
        record = task.record
        # The chunks go first: a refused update can never be needed again.
        self.reassembly.refuse(task)
        # Stored before it is sent: a device that repeats its announcement gets the same answer.
        detail = f"{error.reason.value}: {error}"
        self.store.settle([record.id], TaskPhase.REFUSED, detail)
        task.record = replace(record, phase=TaskPhase.REFUSED, detail=detail)
        self._count(task, error)
        self.outbox.refuse(record, record.device, error.reason, str(error))

    def forget(self, task: str) -> None:
        """Drop what has arrived of an update whose task is over."""
        self.reassembly.forget(task)

    def take_payload_bytes(self) -> int:
        """Return the bytes of the updates stored since the last call."""
        payload_bytes = self._payload_bytes
        self._payload_bytes = 0
        return payload_bytes
