"""The server's dispatcher: one inbox, and every event in it put where it belongs, one at a time,
with deadlines.

All waiting of a run is in `MqttDispatcher.pump`. While it waits, chunks that devices ask for are
published, offers are sent again to devices that came back or stay silent, and uploads are taken.
"""

import contextlib
import logging
import math
import queue
import time
from collections.abc import Callable

from broker_server.rounds.accounting import ByteCount
from broker_server.rounds.collecting import Cohort, Collection, OpenTask
from broker_server.rounds.stopping import StopRequested
from broker_server.service.cohorts import REVEAL_SECONDS
from broker_server.service.connection import Connection, RunParts, Stop
from broker_server.service.control_socket import LocalRequest
from broker_server.service.data_findings import DataFindings
from broker_server.service.label_orders import LabelOrders
from broker_server.service.receiver import Report
from broker_server.service.replies import Replies
from broker_server.service.routing import Handlers, Router
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.messages import Cancel, DeviceProfile, DeviceStatus
from fleet_protocol.messages.presence import ALIVE_SECONDS
from fleet_protocol.secure_sum import Words
from fleet_protocol.transport import (
    BACKOFF_MAX_SECONDS,
    Connected,
    Disconnected,
    Event,
    Received,
    Rejected,
)

_LOG = logging.getLogger(__name__)

TURN_SECONDS = (
    0.2  # longest time that events are handled before what they ask for is committed and answered
)
# that more is waited for, for each device that has not answered: a turn looks at all of them
LINGER_SECONDS = 5e-5
PATIENCE_SECONDS = 1.0  # longest single wait, so that a request to stop is noticed
_MOST_STRANGERS = 10_000
CROSSING_SECONDS = (
    1.0  # a device that says it is idle has this long to answer an offer that is under way
)
SILENT_SECONDS = (
    2.5 * ALIVE_SECONDS
)  # of a device at work, after which it counts as away: a broker takes longer
DEAF_SECONDS = 2.0  # without an empty inbox, which count for no silence
SETTLING_SECONDS = 5.0  # in which the broker has repeated to a server that starts who is there

_IDLE = "idle"  # state of a device that works on nothing, as its status says
_AT_WORK = frozenset(
    {"training", "measuring", "uploading"}
)  # that of one that has everything it needs


class MqttDispatcher:
    """Handles every message to the server during a run.

    `on_control` receives the requests to the server.
    """

    def __init__(
        self,
        connection: Connection,
        parts: RunParts,
        *,
        nudge_seconds: float,
        on_control: Callable[[Received | LocalRequest], None],
    ) -> None:
        self.settling_seconds = SETTLING_SECONDS
        self.operator = parts.operator
        self.fleet = parts.fleet
        self.blobs = parts.blobs
        self.reporter = parts.reporter
        self._clock = parts.clock
        self._connection = connection
        self._topics = connection.topics
        self._outbox = connection.outbox
        self._store = parts.store
        self._uploads = parts.uploads
        self._replies = Replies(parts, connection)
        self._findings = DataFindings(parts.fleet, parts.reporter)
        self._strangers: set[str] = (
            set()
        )  # tasks of which a stray chunk was told, so that each is told once
        self._past: dict[str, OpenTask] = {}  # tasks of this run that are over
        self._dropped = 0
        self._nudge_seconds = nudge_seconds
        parts.fleet.declined.clear()  # for what an earlier run asked
        self._label_orders = LabelOrders(parts.fleet, parts.reporter, compared=parts.open_labels)
        handlers = Handlers(
            sign_of_life=self._heard,
            presence=self._presence,
            reply=self._reply,
            chunk=self._chunk,
            request=on_control,
            server_status=self._note_rival,
            refused=self._refused,
        )
        self._router = Router(connection.topics, connection.limits, parts.fleet.knows, handlers)
        self._collection: Collection | None = None
        self._waiting: dict[
            str, OpenTask
        ] = {}  # that go on beyond their collection, until the next
        self._open = self._waiting  # whose answers are taken
        self._count_at = 0.0
        self._listened = math.inf  # when the inbox was empty last, on the clock of `now`
        self._wire = connection.link.wire, parts.uploads.wire

    # Waiting.

    def now(self) -> float:
        """``time.monotonic()`` without the time in which the broker was away."""
        return self._clock.now()

    @property
    def stopping(self) -> bool:
        """Whether the server should stop."""
        return self._connection.stopping.is_set()

    def pump(self, until: float) -> None:
        """Handle the events that are there, do what is due, commit what was accepted.

        Wait until a time at most.

        Raises:
            StopRequested: the server shall end.
            StorageError: its disk is full.
        """
        if self.stopping:
            raise StopRequested
        now = time.monotonic()
        until = now + until - self._clock.now()
        quiet = [task.quiet for task in self._unanswered if not self._clock.stands]
        wake = min(until, now + PATIENCE_SECONDS, self.blobs.next_due() or until, *quiet)
        with contextlib.suppress(queue.Empty):
            self._handle(self._connection.inbox.get(timeout=max(0.0, wake - now)))
            self._handle_more(time.monotonic(), wake)
        self._uploads.commit()
        self._do_what_is_due(time.monotonic())

    def _handle_more(self, began: float, wake: float) -> None:
        """Handle what has come meanwhile, and comes within a moment, so that one commit is for all
        of it.
        """
        linger = min(wake, began + LINGER_SECONDS * len(self._unanswered))
        while (now := time.monotonic()) < began + TURN_SECONDS:
            try:
                event = self._connection.inbox.get(timeout=max(0.0, linger - now))
            except queue.Empty:
                return
            self._handle(event)

    def _do_what_is_due(self, now: float) -> None:
        for problem in self.blobs.flush(now):
            self.reporter.note("blob-delayed", problem)
        self._uploads.turn(now)
        self._uploads.cohorts.turn(self.fleet.is_online)
        # What is sent while the broker is away waits in memory.
        for task in self._unanswered if not self._clock.stands else ():
            if task.quiet <= now:
                self._uploads.ask_for_missing(task)
            if (
                now - max(task.heard, task.offered) >= self._nudge_seconds
            ):  # silent for so long, it gets it again
                self._offer(task)
        if self._connection.inbox.empty() and not self._clock.stands:
            self._look_for_silent()
        if now >= self._count_at:
            self._count_at = now + PATIENCE_SECONDS
            dropped = self._connection.inbox.dropped - self._dropped
            self._dropped = self._connection.inbox.dropped
            if dropped:
                self.reporter.note(
                    "inbox-full",
                    f"{dropped} messages came faster than they could be handled",
                )
            self.reporter.count()
            self._connection.carry(self.blobs, self.reporter.run)
            self._store.flush()

    def _look_for_silent(self) -> None:
        """Count as away whose task is open and who says nothing, not even to an offer that is
        repeated.

        What a server did not hear because it was busy, or halted itself, is nobody's silence.
        """
        now = self._clock.now()
        deaf = now - self._listened
        self._listened = now
        for task in self._unanswered:
            if deaf > DEAF_SECONDS:
                task.sign += deaf
            silence = now - task.sign
            device = task.record.device
            if silence >= SILENT_SECONDS and self.fleet.is_online(device):
                self.fleet.mark_silent(device)
                task.left = task.sign
                why = f"{device} is connected, and has said nothing for {silence:.0f} s; it is waited for no longer"
                self.reporter.note("silent", why, self._number)
            elif silence >= SILENT_SECONDS / 2 <= time.monotonic() - task.offered:
                self._offer(task)

    def _handle(self, event: Event | LocalRequest | Report | Stop) -> None:
        if isinstance(event, Received | LocalRequest):
            self._router.route(event)
        elif isinstance(event, Stop):
            raise StopRequested
        elif isinstance(event, Connected):
            if self._clock.stands:
                _LOG.warning("the broker is back, and the run goes on")
            self._clock.go_on()
            for task in self._unanswered:
                task.sign = (
                    self._clock.now() + BACKOFF_MAX_SECONDS
                )  # devices come back as late as that
            self._outbox.status(self.reporter.run)
            if not event.session_present:
                self.offer_again()
        elif isinstance(event, Disconnected):
            self._clock.stop()
            lost = f"the connection to the broker is gone ({event.reason}); the round stands still until it is back"
            _LOG.warning(lost)
            self.reporter.note("broker-lost", lost)
            self._connection.revive()
        elif isinstance(event, Rejected):
            # Whoever is named there need not be who sent it.
            self.reporter.refused(
                event.error.reason, str(event.error), device=None, number=self._number
            )
        elif isinstance(event, Report):
            self._uploads.reported(event, self._open)
            for name in event.heard:
                if (heard := self._open.get(name)) is not None:
                    self._heard(heard.record.device)

    def _note_rival(self, payload: bytes) -> None:
        why = self._outbox.rival(payload, self.reporter.run)
        if why:
            self.reporter.note("another-server", why, self._number)

    def _refused(self, error: RefusedError, device: str | None) -> None:
        self.reporter.refused(error.reason, str(error), device=device, number=self._number)

    @property
    def _unanswered(self) -> list[OpenTask]:
        return self._collection.unanswered if self._collection is not None else []

    @property
    def _number(self) -> int | None:
        return self._collection.number if self._collection is not None else None

    def _reply(self, device: str, payload: bytes) -> None:
        self._replies.take(device, payload, self._open, self._past)

    # Presence.

    def _heard(self, device: str) -> None:
        self.fleet.mark_active(device)
        for task in self._collection.of_device(device) if self._collection is not None else ():
            task.sign = self._clock.now()

    def _presence(self, said: DeviceStatus | DeviceProfile) -> None:
        device = said.device
        changed = self.fleet.receive(said)
        self._store.record_device(said)
        self._label_orders.look(device)
        if isinstance(said, DeviceProfile):
            self._findings.look(device, self._number)
            return
        if said.state in _AT_WORK:
            self.blobs.arrived(device)
        if not said.online:
            self.blobs.forget(device)
        elif self._collection is not None:
            for task in self._collection.of_device(device):
                if changed:
                    self._offer(task)
                elif said.state == _IDLE:
                    # Either our offer and this message have crossed, or a broker's restart
                    # swallowed the offer.
                    due = time.monotonic() - self._nudge_seconds + CROSSING_SECONDS
                    task.offered, task.heard = (
                        min(task.offered, due),
                        min(task.heard, due),
                    )

    # Offers.

    def open(self, collection: Collection) -> None:
        """Begin to collect, in place of the collection before: offer every open task whose device
        is there.
        """
        self._collection = collection
        if collection.kind == "train":
            self._waiting = {}
        self._open = {**self._waiting, **collection.tasks}
        self._uploads.cohorts.open(collection)
        self._uploads.open(self._open.values())
        self._strangers.clear()
        for task in collection.tasks.values():
            self._findings.look(task.record.device, collection.number)
        self.offer_again()
        self._listened = self._clock.now()

    def close(self, reason: str, *, waits: bool = False) -> None:
        """End the collection, or where there is none what goes on beyond one.

        Devices that still work are told.

        Args:
            reason: for their log.
            waits: they go on, and answer in a later collection.
        """
        collection = self._collection
        self._collection = None
        self._uploads.cohorts.close()
        if collection is not None:
            self._past = {
                **(self._past if len(self._past) < _MOST_STRANGERS else {}),
                **collection.tasks,
            }
        over = tuple(self._waiting.values() if collection is None else collection.unanswered)
        if collection is None or waits:
            self._waiting = {task.record.id: task for task in over if waits}
        self._open = self._waiting
        self._uploads.open(self._waiting.values())
        if waits:
            return
        for task in over:
            self._outbox.tell(Cancel, task.record, reason=reason)

    def offer_again(self) -> None:
        """Send every open offer once more."""
        for task in self._unanswered:
            self._offer(task)

    def _offer(self, task: OpenTask) -> None:
        collection = self._collection
        now = self._clock.now()
        if (
            collection is None
            or not self.fleet.is_online(task.record.device)
            or now >= collection.deadline
        ):
            return
        for ref in (task.record.artifact_set, task.record.weights):
            if task.offered < 0 and not self.blobs.asked(ref.digest, task.record.device):
                self.blobs.expect(ref.digest, task.record.device)
        task.offered = time.monotonic()
        task.sign = now if math.isinf(task.sign) else task.sign
        sums = collection.cohorts() if task.instructions.upload.summing is not None else ()
        more = REVEAL_SECONDS * len(sums)  # they are made one after the other
        self._outbox.offer(task.record, task.instructions, collection.deadline + more - now)

    # Uploads.

    def _chunk(self, task_id: str, event: Received) -> None:
        task = self._open.get(task_id)
        if task is not None:
            owner = task.record.device
            if event.signer not in {None, owner}:
                raise RefusedError(
                    RefusalReason.FORGED,
                    f"{event.signer} sent chunks of the update of {owner}",
                )
            task.heard = time.monotonic()
            self._heard(owner)
            self._uploads.chunk(task, event.payload)
            return
        if task_id in self._strangers or len(self._strangers) >= _MOST_STRANGERS:
            return
        self._strangers.add(task_id)
        reason = RefusalReason.LATE if task_id in self._past else RefusalReason.UNKNOWN_TASK
        raise RefusedError(reason, f"chunks of task {task_id}, which is not open")

    def total(self, cohort: Cohort) -> Words:
        """Ask the devices for what takes the masks off a sum, and take them off."""
        return self._uploads.cohorts.total(cohort, self.pump)

    # What is over.

    def forget(self, task: str) -> None:
        """Drop what came of the update of a task that is over."""
        self._uploads.forget(task)

    def count_bytes(self) -> ByteCount:
        """Bytes since the last call, at first since the run began.

        See `broker_server.rounds.accounting`.
        """
        before = self._wire
        self._wire = (self._connection.link.wire, self._uploads.wire)
        wire = sum(item.sent + item.received for item in self._wire) - sum(
            was.sent + was.received for was in before
        )
        return ByteCount(wire, self.blobs.take_payload_bytes() + self._uploads.take_payload_bytes())
