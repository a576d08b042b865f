"""Handles the events of a run one at a time, from one inbox.

All waiting of a run is in `MqttDispatcher.pump`. While it waits, it publishes requested chunks,
repeats offers to devices that reconnected or stay silent, and receives uploads.
"""

import contextlib
import logging
import queue
import time
from collections.abc import Callable

from broker_server.rounds.accounting import ByteCount
from broker_server.rounds.collecting import Cohort, CohortSum, Collection, OpenTask
from broker_server.rounds.stopping import StopRequested
from broker_server.service.broker_refusals import BrokerRefusals
from broker_server.service.connection import Connection, RunServices, Stop
from broker_server.service.control_socket import LocalRequest
from broker_server.service.data_findings import DataFindings
from broker_server.service.label_orders import LabelOrders
from broker_server.service.offers import Offers
from broker_server.service.reassembly import require_owner
from broker_server.service.receiver_messages import Report
from broker_server.service.replies import Replies
from broker_server.service.routing import Handlers, Router
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.folded_lines import FoldedLines
from fleet_protocol.messages import Cancel, DeviceProfile, DeviceStatus
from fleet_protocol.refusals import explain
from fleet_protocol.transport import (
    Connected,
    Disconnected,
    Event,
    LoginRefused,
    Received,
    Refused,
    Rejected,
    WireCount,
)

_LOG = logging.getLogger(__name__)

# longest time of handling events before their results are committed and answered
TURN_SECONDS = 0.2
# additional waiting time for each device that has not answered: one turn visits all of them
LINGER_SECONDS = 5e-5
PATIENCE_SECONDS = 1.0  # longest single wait, so that a stop request is noticed
# in which the broker has repeated the presence of devices to a server that starts
SETTLING_SECONDS = 5.0
_MOST_STRAY_TASKS = 10_000

_IDLE = "idle"  # state of an idle device, as its status names it
# states of a device that has received everything it needs
_AT_WORK = frozenset({"training", "measuring", "uploading"})


class MqttDispatcher:
    """Handles every message to the server during a run.

    Args:
        connection: connection of the server.
        services: services of the run.
        nudge_seconds: time without a message about a task, after which it is offered again.
        handle_request: handles the requests to the server.
    """

    def __init__(
        self,
        connection: Connection,
        services: RunServices,
        *,
        nudge_seconds: float,
        handle_request: Callable[[Received | LocalRequest], None],
    ) -> None:
        self.settling_seconds = SETTLING_SECONDS
        self.operator = services.operator
        self.fleet = services.fleet
        self.blobs = services.blobs
        self.reporter = services.reporter
        self._clock = services.clock
        self._connection = connection
        self._inbox = connection.inbox
        self._outbox = connection.outbox
        self._store = services.store
        self._uploads = services.uploads
        self._reassembly = services.uploads.reassembly
        self._replies = Replies(services, connection)
        self._refusals = BrokerRefusals(services, connection.topics, connection.link.address)
        self._lines = FoldedLines(self._note_broker)
        self._findings = DataFindings(services.fleet, services.reporter)
        self._offers = Offers(services, connection.outbox, nudge_seconds)
        self._stray_tasks: set[str] = set()  # not open, for which a chunk was refused already
        self._past: dict[str, OpenTask] = {}  # tasks of this run that are over
        # tasks that continue beyond their collection, into the next
        self._waiting: dict[str, OpenTask] = {}
        self._open = self._waiting  # tasks whose answers are handled
        self._dropped = 0
        self._housekeeping_at = 0.0
        self._wire = self._wire_counts()
        services.fleet.forget_declined()  # for requests of an earlier run
        self._label_orders = LabelOrders(
            services.fleet, services.reporter, compared=services.open_labels
        )
        handlers = Handlers(
            sign_of_life=self._offers.note_sign,
            presence=self._receive_presence,
            reply=self._receive_reply,
            chunk=self._receive_chunk,
            request=handle_request,
            server_status=self._note_other_server,
            refused=self._count_refused,
        )
        self._router = Router(connection.topics, connection.limits, services.fleet.knows, handlers)

    # Waiting.

    def now(self) -> float:
        """Return ``time.monotonic()`` without the time during which the broker was unreachable."""
        return self._clock.now()

    @property
    def stopping(self) -> bool:
        """Whether the server must stop."""
        return self._connection.stopping.is_set()

    def pump(self, until: float) -> None:
        """Handle the present events, do what is due, and commit what was accepted.

        Args:
            until: when to stop waiting, by the clock of `now`.

        Raises:
            StopRequested: the server must end.
            StorageError: the server's disk is full.
        """
        # At the beginning of a turn: whatever the turn before accepted has been committed.
        if self.stopping:
            raise StopRequested
        now = time.monotonic()
        # The clock of the run stands while the broker is away; waiting needs real time.
        until = now + until - self._clock.now()
        wake_at = min(until, now + PATIENCE_SECONDS, self.blobs.next_due() or until)
        if not self._clock.stands:
            wake_at = min(wake_at, self._uploads.next_due())
        # The inbox may be empty: something may be due without a message.
        with contextlib.suppress(queue.Empty):
            self._handle(self._inbox.get(timeout=max(0.0, wake_at - now)))
            self._handle_more(time.monotonic(), wake_at)
        # After everything that has arrived meanwhile: many updates share one sync and one commit.
        self._uploads.commit()
        self._do_what_is_due(time.monotonic())

    def _handle_more(self, began: float, wake_at: float) -> None:
        """Handle the events that arrive within a moment, so that one commit covers them."""
        linger = min(wake_at, began + LINGER_SECONDS * len(self._offers.unanswered))
        while (now := time.monotonic()) < began + TURN_SECONDS:
            try:
                event = self._inbox.get(timeout=max(0.0, linger - now))
            except queue.Empty:
                return
            self._handle(event)

    def _do_what_is_due(self, now: float) -> None:
        for problem in self.blobs.flush(now):
            self.reporter.note("blob-delayed", problem)
        # Also while the broker is away: a receiver that died has nothing to do with it.
        self._uploads.restart_failed_receivers(now)
        self._uploads.cohorts.advance_due(self.fleet.is_online)
        if not self._clock.stands:  # otherwise it would wait in memory
            self._uploads.ask_for_missing(now)
            self._offers.repeat_due(now)
            # Messages that wait in the inbox may be the signs of life that seem to be missing.
            if self._inbox.empty():
                self._offers.count_silent()
        if now >= self._housekeeping_at:
            self._housekeeping_at = now + PATIENCE_SECONDS
            self._do_maintenance()

    def _do_maintenance(self) -> None:
        """Report and store the counts in memory."""
        dropped = self._inbox.dropped - self._dropped
        self._dropped = self._inbox.dropped
        if dropped:
            self.reporter.note(
                "inbox-full",
                f"{dropped} messages arrived faster than the server could handle them",
            )
        self.reporter.count()
        self._connection.do_periodic_work(self.blobs, self.reporter.run)
        self._store.flush()

    # Events.

    def _handle(self, event: Event | LocalRequest | Report | Stop) -> None:
        match event:
            case Received() | LocalRequest():
                self._router.route(event)
            case Stop():
                raise StopRequested
            case Connected():
                self._go_on(event)
            case Disconnected():
                self._stand_still(event)
            case Refused():
                self._outbox.note_refused(event.topic)
                self._refusals.receive(event, self._open)
            case LoginRefused():
                self._lines.warning("refused", f"the broker refuses it {explain(event.code)}")
            case Rejected():
                # The named device need not be the sender.
                self._count_refused(event.error, None)
            case Report():
                self._receive_report(event)

    def _go_on(self, event: Connected) -> None:
        if self._clock.stands:
            self._lines.info(
                "back", "the connection to the broker is restored, and the run continues"
            )
        self._clock.go_on()
        self._offers.note_reconnection()
        self._outbox.publish_status(self.reporter.run)
        if not event.session_present:  # otherwise the broker has kept what was sent meanwhile
            self._offers.repeat_all()

    def _stand_still(self, event: Disconnected) -> None:
        self._clock.stop()
        self._lines.warning(
            f"lost {event.code}",
            f"the connection to the broker is lost ({event.reason}); the round pauses until "
            "it is restored",
        )
        self._connection.revive_broker()

    def _note_broker(self, level: int, line: str) -> None:
        _LOG.warning(line)
        if level > logging.INFO:
            self.reporter.note("broker-lost", line)

    def _receive_report(self, report: Report) -> None:
        self._uploads.apply_report(report, self._open)
        for name in report.active_tasks:
            task = self._open.get(name)
            if task is not None:
                self._note_sign_of(task)

    def _note_sign_of(self, task: OpenTask) -> None:
        task.heard = time.monotonic()
        self._offers.note_sign(task.record.device)

    def _receive_presence(self, presence: DeviceStatus | DeviceProfile) -> None:
        device = presence.device
        changed = self.fleet.receive(presence)
        self._store.record_device(presence)
        self._label_orders.check(device)
        if isinstance(presence, DeviceProfile):
            self._findings.log(device, self._offers.round_number)
            return
        # It has all blobs of its task then, so nothing more is published to it.
        if presence.state in _AT_WORK:
            self.blobs.note_work(device)
        if not presence.online:
            self.blobs.forget(device)
        elif changed:
            self._offers.note_arrival(device)
        elif presence.state == _IDLE:
            self._offers.note_idle(device)

    def _receive_reply(self, device: str, payload: bytes) -> None:
        self._replies.receive(device, payload, self._open, self._past)

    def _receive_chunk(self, task_id: str, chunk: Received) -> None:
        try:
            self._take_chunk(task_id, chunk)
        except RefusedError as error:
            self._count_refused(error, self._sender_of(task_id, chunk))

    def _take_chunk(self, task_id: str, chunk: Received) -> None:
        task = self._open.get(task_id)
        if task is None:
            self._refuse_stray_chunk(task_id)
            return
        # Before it counts as a sign of life: another device's chunks must not keep a silent one in
        # the round.
        require_owner(task, chunk.signer)
        self._note_sign_of(task)
        outcome = self._reassembly.add_chunk(task, chunk.payload)
        if outcome is not None:
            self._uploads.apply_outcome(task, outcome)

    def _sender_of(self, task_id: str, chunk: Received) -> str | None:
        """Return the device that sent a chunk, whose topic names only its task, if it is known."""
        if chunk.signer is not None:
            return chunk.signer
        record = self._store.task(task_id)
        return None if record is None else record.device

    def _refuse_stray_chunk(self, task_id: str) -> None:
        """Refuse the first chunk of each task that is not open: a whole update may follow."""
        if task_id in self._stray_tasks or len(self._stray_tasks) >= _MOST_STRAY_TASKS:
            return
        self._stray_tasks.add(task_id)
        reason = RefusalReason.LATE if task_id in self._past else RefusalReason.UNKNOWN_TASK
        raise RefusedError(reason, f"chunks of task {task_id}, which is not open")

    def _note_other_server(self, payload: bytes) -> None:
        why = self._outbox.find_other_server(payload, self.reporter.run)
        if why:
            self.reporter.note("another-server", why, self._offers.round_number)

    def _count_refused(self, error: RefusedError, device: str | None) -> None:
        number = self._offers.round_number
        self.reporter.refused(error.reason, str(error), device=device, number=number)

    # Collections.

    def open(self, collection: Collection) -> None:
        """Begin to collect, replacing the previous collection.

        Every open task is offered to its device if that is online.
        """
        if collection.kind == "train":
            self._waiting = {}
        self._open = {**self._waiting, **collection.tasks}
        self._uploads.cohorts.open(collection)
        self._uploads.set_open_tasks(self._open)
        # Tasks that were unknown before may be among those that are open now.
        self._stray_tasks.clear()
        for task in collection.tasks.values():
            self._findings.log(task.record.device, collection.number)
        self._offers.open(collection)

    def close(self, reason: str, *, waits: bool = False) -> None:
        """End the collection, or without one the tasks that continue beyond it.

        Args:
            reason: sent to the devices that are still working, for their log.
            waits: they continue, and answer in a later collection.
        """
        collection = self._offers.close()
        self._uploads.cohorts.close()
        if collection is None:
            unanswered = list(self._waiting.values())
        else:
            unanswered = collection.unanswered
            # A run of many rounds must not grow; the oldest tasks have long been given up by their
            # devices.
            if len(self._past) >= _MOST_STRAY_TASKS:
                self._past = {}
            self._past |= collection.tasks
        if waits:
            self._waiting = {task.record.id: task for task in unanswered}
        elif collection is None:
            self._waiting = {}
        self._open = self._waiting
        self._uploads.set_open_tasks(self._waiting)
        if waits:
            return
        for task in unanswered:
            self._outbox.send_about(Cancel, task.record, reason=reason)

    @property
    def has_begun_sums(self) -> bool:
        """Return whether the opening of a secure sum has begun."""
        return self._uploads.cohorts.has_begun

    def sum_obstacle(self, cohort: Cohort) -> str:
        """Return why the sum of a cohort cannot be opened; empty if it can."""
        return self._uploads.cohorts.obstacle(cohort)

    def total(self, cohort: Cohort) -> CohortSum:
        """Request what removes the masks of a sum from the devices, and remove them."""
        return self._uploads.cohorts.total(cohort, self.pump)

    def forget(self, task: str) -> None:
        """Drop the part of a finished task's update that has arrived."""
        self._uploads.forget(task)

    def count_bytes(self) -> ByteCount:
        """Return the bytes since the last call, at first since the run began.

        See `broker_server.rounds.accounting`.
        """
        before = self._wire
        self._wire = self._wire_counts()
        wire = _total(self._wire) - _total(before)
        payload_bytes = self.blobs.take_payload_bytes() + self._uploads.take_payload_bytes()
        return ByteCount(wire, payload_bytes)

    def _wire_counts(self) -> tuple[WireCount, WireCount]:
        return self._connection.link.wire, self._uploads.wire


def _total(counts: tuple[WireCount, WireCount]) -> int:
    return sum(count.sent + count.received for count in counts)
