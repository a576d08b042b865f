"""A process that receives updates for its server, and stores the updates of its tasks on disk.

It has a separate connection, on which it subscribes to the chunks of its tasks and publishes
nothing. It reports to its server; only the server writes the database, acknowledges and decides.
Nothing is reported before it would survive a power cut, so a receiver may die at any moment: the
server asks its successor for everything that was not reported.

Run as a module: ``python -m broker_server.service.receiver`` reads orders from its standard input
until that closes, and writes reports to its standard output.
"""

import contextlib
import logging
import math
import os
import queue
import secrets
import signal
import sys
import threading
import time
from dataclasses import dataclass

from broker_server.rounds.collecting import OpenTask
from broker_server.service.inbox import Inbox
from broker_server.service.membership import broker_address, member_of
from broker_server.service.partial_uploads import PartialUploads
from broker_server.service.reassembly import Reassembly, UploadOutcome, require_owner
from broker_server.service.receiver_messages import (
    ORDERS,
    AnnouncedUpdate,
    AssignedTasks,
    ReceiverSettings,
    Report,
)
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.errors import (
    RefusalReason,
    RefusedError,
    ShoalError,
    StorageError,
)
from fleet_protocol.topics import Topics, UploadTopic
from fleet_protocol.transport import Received, Rejected, open_transport

_LOG = logging.getLogger(__name__)
_REST_SECONDS = 0.02  # in which more arrives: waking up for every chunk takes more processor time
# longest time in which chunks are received before complete updates are synced and reported
_BATCH_SECONDS = 0.2
REPORT_SECONDS = 1.0  # longest time without a report
# longest time without a line from the server, after which the server counts as gone although the
# pipe is open
ORDERS_SECONDS = 20


@dataclass(frozen=True)
class TaskChanges:
    """Ids of the tasks that a receiver has gained, and of those that it has lost."""

    added: set[str]
    removed: set[str]


class Receiver:
    """The updates of some tasks.

    Args:
        partial: holds their chunks.
    """

    def __init__(self, partial: PartialUploads) -> None:
        self._blobs = partial.blobs
        self._sent = partial.sent
        self._reassembly = Reassembly(partial)
        self._tasks: dict[str, OpenTask] = {}
        self._final: dict[str, UploadOutcome] = {}  # stored and refused updates, by task
        self._outcomes: list[UploadOutcome] = []  # to be reported
        self._active_tasks: set[str] = set()  # to be reported

    def assign(self, order: AssignedTasks) -> TaskChanges:
        """Replace the tasks; those that stay keep what has arrived for them."""
        # Slices of a round that is over need not stay mapped.
        self._sent.cache_clear()
        before = self._tasks
        self._tasks = {}
        for assigned in order.tasks:
            record = assigned.record
            manifests = {choice.tier: order.manifests[choice.tier] for choice in record.choices}
            task = OpenTask(
                record,
                manifests[record.tier],
                manifests=manifests,
                instructions=order.instructions[assigned.instructions],
            )
            # The previous task has the tier that its device has chosen since.
            self._tasks[record.id] = before.get(record.id, task)
        removed = before.keys() - self._tasks.keys()
        for name in removed:
            self._reassembly.forget(name)
            self._final.pop(name, None)
        return TaskChanges(added=self._tasks.keys() - before.keys(), removed=removed)

    def receive_chunk(self, name: str, chunk: Received) -> None:
        """Add a chunk of a task, and store the update that it completes.

        Raises:
            StorageError: the disk is full.
        """
        task = self._tasks.get(name)
        if task is None:
            return
        try:
            require_owner(task, chunk.signer)
        except RefusedError as error:
            self.count_refusal(error)
            return
        self._active_tasks.add(name)
        self._note(self._reassembly.add_chunk(task, chunk.payload))

    def announce(self, order: AnnouncedUpdate) -> None:
        """Store an announced update as soon as it is complete.

        Raises:
            StorageError: the disk is full.
        """
        task = self._tasks.get(order.task)
        if task is None:
            return
        final = self._final.pop(order.task, None)
        if final is not None and final.update == order.update.digest:
            self._note(final)  # reported again: the server had not read the report
            return
        task.choose_tier(order.tier)
        self._note(self._reassembly.announce(task, order.update))

    def ask_for_missing(self, now: float) -> float:
        """Report the missing chunks that are overdue; return when the next ones are due."""
        for missing in self._reassembly.pop_overdue(now):
            outcome = UploadOutcome(
                kind="missing",
                task=missing.task.record.id,
                update=missing.update.digest,
                ranges=missing.ranges,
            )
            self._outcomes.append(outcome)
        return self._reassembly.next_due()

    def count_refusal(self, error: RefusedError) -> None:
        """Report a refused chunk that counts for no task."""
        counted = UploadOutcome(kind="counted", task=None, reason=error.reason, detail=str(error))
        self._outcomes.append(counted)

    def _note(self, outcome: UploadOutcome | None) -> None:
        """Report an outcome, if there is one."""
        if outcome is None:
            return
        # The others are not final: the device sends chunks, or the whole update, again.
        if outcome.task is not None and outcome.kind in {"stored", "refused"}:
            self._final[outcome.task] = outcome
        self._outcomes.append(outcome)

    @property
    def has_outcomes(self) -> bool:
        """Whether anything must be reported before the next report is due."""
        return bool(self._outcomes)

    def collect_report(self) -> Report:
        """Return the outcomes since the last report, once they would survive a power cut.

        Raises:
            StorageError: the disk is full.
        """
        report = Report(outcomes=tuple(self._outcomes), active_tasks=tuple(self._active_tasks))
        self._outcomes.clear()
        self._active_tasks.clear()
        stored = {outcome.merged for outcome in report.outcomes if outcome.kind == "stored"}
        # The order matters: a reported outcome must survive a power cut.
        self._blobs.sync(stored)
        return report


class _ReceiverProcess:
    """A receiver with its connection to the broker and its pipes to the server."""

    def __init__(self, settings: ReceiverSettings, inbox: Inbox) -> None:
        self._inbox = inbox
        self._rest = threading.Event()
        self._topics = Topics(settings.fleet)
        updates = BlobStore(settings.store / "updates")
        blobs = BlobStore(settings.store / "blobs")
        self._receiver = Receiver(PartialUploads(updates, blobs))
        self._link = open_transport(
            broker_address(settings.broker),
            f"shoal-{settings.fleet}-receiver-{secrets.token_hex(4)}",
            inbox,
            session_expiry_seconds=0,  # messages lost with the connection are requested again
            member=member_of(settings.broker),
        )
        self._link.connect(settings.broker.connect_timeout_seconds)

    def work(self) -> None:
        """Work until the process ends.

        Raises:
            StorageError: the disk is full.
        """
        report_at = -math.inf
        while True:
            now = time.monotonic()
            due = self._receiver.ask_for_missing(now)
            if self._receiver.has_outcomes or now >= report_at:
                self._write(self._receiver.collect_report())
                report_at = now + REPORT_SECONDS
            self._handle_events(now + _BATCH_SECONDS, min(due, report_at))

    def _handle_events(self, batch_end: float, wake_at: float) -> None:
        """Wait for an event until a given time, then handle all that have arrived."""
        with contextlib.suppress(queue.Empty):
            self._handle(self._inbox.get(timeout=max(0.0, wake_at - time.monotonic())))
            # After the first event, because devices send many chunks at a time.
            self._rest.wait(_REST_SECONDS)
            while time.monotonic() < batch_end:
                self._handle(self._inbox.get_nowait())

    def report_failure(self, error: StorageError) -> None:
        """Report why the process ends."""
        self._write(Report(failed=str(error)))

    def _write(self, report: Report) -> None:
        wire = self._link.wire
        counts = {
            "sent": wire.sent,
            "received": wire.received,
            "cpu_seconds": time.process_time(),
        }
        line = report.model_copy(update=counts).to_bytes()
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()

    def _handle(self, event: object) -> None:
        try:
            self._dispatch(event)
        except StorageError:
            raise
        except Exception as error:  # noqa: BLE001  (as in the server: no message may end it)
            _LOG.exception("a receiver could not handle a message")
            detail = f"{type(error).__name__}: {error}"
            self._receiver.count_refusal(RefusedError(RefusalReason.FAILED, detail))

    def _dispatch(self, event: object) -> None:
        match event:
            case Received():
                topic = self._topics.parse(event.topic)
                if isinstance(topic, UploadTopic):
                    self._receiver.receive_chunk(topic.task, event)
            case Rejected():
                self._receiver.count_refusal(event.error)
            case AnnouncedUpdate():
                self._receiver.announce(event)
            case AssignedTasks():
                self._subscribe(self._receiver.assign(event))

    def _subscribe(self, changes: TaskChanges) -> None:
        for task in changes.removed:
            self._link.unsubscribe(self._topics.upload(task, "+"))
        for task in changes.added:
            self._link.subscribe(self._topics.upload(task, "+"), timeout_seconds=0)


def _read_orders(inbox: Inbox) -> None:
    """Put the server's orders into the inbox; end the process with the server.

    The alarm ends the process if the server is gone although the pipe stays open, as behind ssh.
    """
    signal.alarm(ORDERS_SECONDS)
    for line in sys.stdin.buffer:
        signal.alarm(ORDERS_SECONDS)
        if line.strip():  # an empty line only shows that the server is running
            inbox.put(ORDERS.validate_json(line))
    os._exit(0)


def _main() -> None:
    # The only line that is waited for: all later ones arrive through the inbox.
    settings = ReceiverSettings.model_validate_json(sys.stdin.buffer.readline())
    inbox = Inbox()
    threading.Thread(target=_read_orders, args=(inbox,), name="orders", daemon=True).start()
    process = None
    try:
        process = _ReceiverProcess(settings, inbox)
        process.work()
    except ShoalError as error:
        if isinstance(error, StorageError) and process is not None:
            process.report_failure(error)
        sys.stderr.write(f"a receiver of updates exits: {error}\n")
    os._exit(1)


if __name__ == "__main__":
    _main()
