"""The shared context of the agent's states: its services, its uplink and the current task."""

import contextlib
import math
import queue
import time
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from device_runtime.agent.agreement import Agreement
from device_runtime.agent.cache import Cache
from device_runtime.agent.data_findings import DataFindings
from device_runtime.agent.journal import Journal
from device_runtime.agent.machine import WORKING, Event, State
from device_runtime.agent.measurements import Measurements, ReportedData
from device_runtime.agent.memory import MemoryRecord
from device_runtime.agent.opened_sums import OpenedSums
from device_runtime.agent.refusals import Refusal, refusal_of
from device_runtime.agent.releases import Releases
from device_runtime.agent.sample_files import SampleFiles
from device_runtime.agent.task_in_hand import TaskInHand
from device_runtime.agent.task_store import TaskStore
from device_runtime.agent.uplink import Uplink
from device_runtime.agent.worker import Worker
from device_runtime.conditions import ConditionWatch
from device_runtime.settings import DeviceConfig
from device_runtime.training.task import DeviceSetup
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.errors import RefusalReason, RefusedError, StorageError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import Accept, Offer, Profile

_OUTCOMES_KEPT = 32
_LASTING_SECONDS = 1.0
_REFUSALS_LOGGED = 5
_INTRODUCTION_SECONDS = 2.0  # between two introductions
# A paused board gives its task back unless the update is finished: a finished update is worth its
# upload.
_GIVEN_BACK = {*WORKING} - {State.UPLOADING}


@dataclass(frozen=True)
class AgentServices:
    """The services that an agent uses from start to end."""

    config: DeviceConfig  # the operator's settings
    inbox: queue.SimpleQueue[Any]  # all events
    journal: Journal  # the log
    blobs: BlobStore  # content-addressed files
    store: TaskStore  # the task record
    cache: Cache  # what the blobs are for
    memory: MemoryRecord  # what was too large for this board
    opened_sums: OpenedSums  # secure sums for which this board has revealed shares
    worker: Worker  # the thread for long jobs
    agreement: Agreement  # brings the data into the form of the fleet's contract
    findings: DataFindings  # the findings in the data
    samples: SampleFiles  # reads the sample files again when they change

    @classmethod
    def build(cls, config: DeviceConfig) -> "AgentServices":
        """Return the services of an agent with a configuration."""
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        blobs = BlobStore(config.state_dir)
        journal = Journal(config.device)
        return cls(
            config=config,
            inbox=inbox,
            journal=journal,
            blobs=blobs,
            store=TaskStore(config.state_dir),
            cache=Cache(config.state_dir, blobs, config.max_cache_bytes),
            memory=MemoryRecord(config.state_dir, config.conditions.root),
            opened_sums=OpenedSums(config.state_dir),
            worker=Worker(inbox),
            agreement=Agreement(config.state_dir),
            findings=DataFindings(config.state_dir, journal),
            samples=SampleFiles(config.data, journal),
        )


@dataclass(frozen=True)
class TaskOutcome:
    """How a task ended on this board."""

    task: str  # its id
    event: Event
    refusal: Refusal | None = None  # in which this board gave it up


@dataclass
class Context:
    """The context that the agent's loop and its states share.

    Attributes:
        services: services of the agent.
        uplink: its messages to the fleet.
        watch: checks the operator's conditions.
        releases: the runtimes of this board.
        measurements: measurements of the board, its link and its training.
        state: state of the machine; only the agent's loop sets it.
        setup: backend, and data as its reader returned it; set once the agent has measured the
            board. `services.agreement` converts the data to the form that a task uses.
        task: the current task, from the offer to its end.
        pending_offer: an offer that waits until the current task is dropped.
        failure: the reason for the next refusal of the task.
        events: posted but not yet handled.
        outcomes: how recent tasks ended.
        refused: number of messages from senders without the right to send them, by reason.
        staged: digests of the files of artifact sets that are fetched in advance.
        status_at: ``time.monotonic()`` at which the state is announced if it still holds.
        introduced_at: ``time.monotonic()`` of the last answer to a server that asked for this
            board's profile.
    """

    services: AgentServices
    uplink: Uplink
    watch: ConditionWatch
    releases: Releases
    measurements: Measurements = field(default_factory=Measurements)
    state: State = State.STARTING
    setup: DeviceSetup | None = None
    task: TaskInHand | None = None
    pending_offer: Offer | None = None
    failure: Refusal | None = None
    events: deque[Event] = field(default_factory=deque)
    outcomes: deque[TaskOutcome] = field(default_factory=lambda: deque(maxlen=_OUTCOMES_KEPT))
    refused: Counter[RefusalReason] = field(default_factory=Counter)
    staged: Collection[str] = ()
    status_at: float = math.inf
    introduced_at: float = -math.inf

    # Events and failures.

    def post(self, event: Event) -> None:
        """Post an event that a state has seen; the loop handles it before the rest of the inbox."""
        self.events.append(event)

    def fail(self, error: Exception) -> None:
        """Give up the task, or without a task the release, and send the server the reason."""
        self.failure = refusal_of(error)
        reason, detail = self.failure
        expected = isinstance(error, RefusedError | StorageError)
        is_bug = reason is RefusalReason.FAILED and not expected
        self.services.journal.error(f"failed: {detail}", error if is_bug else None)
        if self.task is not None:
            self.post(Event.FAILED)
        elif self.releases.wanted is not None:
            release, _ref = self.releases.wanted
            with contextlib.suppress(
                StorageError
            ):  # it is tried again when the server sends it again
                self.releases.move("unfit", release.number, detail, sets=bool(release.sets))
            self.publish_status()

    def journal_refusal(self, error: RefusedError) -> None:
        """Count a message from a sender without the right to send it; log only some of them."""
        self.refused[error.reason] += 1
        count = self.refused[error.reason]
        if count <= _REFUSALS_LOGGED or count % 100 == 0:
            self.services.journal.warning(
                f"refused, {error.reason.value} ({count} so far): {error}"
            )

    # The task in hand.

    def need_task(self) -> TaskInHand:
        """Return the current task."""
        if self.task is None:
            raise RuntimeError(
                f"the device in state {self.state.value!r} has no task; this is a bug"
            )
        return self.task

    def need_setup(self) -> DeviceSetup:
        """Return data and backend."""
        if self.setup is None:
            raise RuntimeError(
                f"the device in state {self.state.value!r} has not loaded its data; this is a bug"
            )
        return self.setup

    def hold(self, task: TaskInHand) -> None:
        """Make a task the current one.

        If its update goes into a secure sum, the task gets keys that exist only in memory: after a
        restart the board joins the sum with other keys.
        """
        self.task = task
        summing = task.offer.upload.summing
        if summing is not None:
            # It needs cryptography, whose memory small boards need for other tasks.
            from fleet_protocol.secure_sum import Member  # noqa: PLC0415

            weights = task.record.choice.weights
            task.member = Member(self.services.config.device, weights.digest, summing.least)

    def save(self, **changes: object) -> None:
        """Change the task record, first on disk.

        Raises:
            StorageError: the disk is full; record and file are as before.
        """
        task = self.need_task()
        record = task.record.model_copy(update=changes)
        self.services.store.save(record)
        task.record = record

    def blobs_in_use(self) -> set[str]:
        """Return the digests of the blobs that must stay on disk."""
        digests: set[str] = set()
        if self.releases.wanted is not None:
            _release, ref = self.releases.wanted
            digests |= {ref.digest, *self.staged}
        if self.task is not None:
            digests |= self.task.blobs_in_use()
        return digests

    # Messages.

    def send(self, kind: type[FrozenModel], **fields: object) -> None:
        """Send a device message about the current task, or without a task about the release.

        It waits while the broker is unreachable.
        """
        if self.task is None and self.releases.wanted is not None:
            release, _ref = self.releases.wanted
            self.uplink.send(release, kind, **fields)
        else:
            self.uplink.send(self.need_task().offer, kind, **fields)

    def accept(self, lacks: Sequence[str] = ()) -> None:
        """Accept the current task, possibly again; `lacks` are the blobs that it requests."""
        task = self.need_task()
        self.send(
            Accept,
            tier=task.announced_tier,
            lacks=lacks,
            keys=None if task.member is None else task.member.keys,
            # A clock before 1970 is as wrong as one that shows its first second.
            clock=max(0, int(time.time())),
        )

    def publish_status(self, *, with_state: bool = True) -> None:
        """Publish the device's status, and its profile if that has changed."""
        profile = None
        # Measurements of a task are published once, at its end.
        between_tasks = self.state is State.IDLE or self.uplink.sent_profile is None
        if between_tasks and self.setup is not None:
            profile = self._profile(self.setup)
        self.uplink.publish_status(self.state.value if with_state else None, profile)
        # If the broker has refused the last status, this is the time of the next attempt.
        self.status_at = self.uplink.refused_presence.due

    def publish_profile(self) -> None:
        """Publish the device's profile and status, also during a task.

        New findings in samples that were read again are due immediately.
        """
        self.uplink.publish_status(None, self._profile(self.need_setup()))

    def _profile(self, setup: DeviceSetup) -> Profile | None:
        findings = self.services.findings.find(setup.data)
        reports = self.services.config.report_data
        data = ReportedData(setup.examples)
        if reports:
            data = ReportedData(setup.examples, findings, setup.data.facts.labels_digest)
        return self.measurements.profile(
            self.services.config, data, self.services.memory, self.releases
        )

    def introduce(self) -> None:
        """Publish the profile and status again, because the server asks for them."""
        now = time.monotonic()
        # In a fleet without identities anybody can send this request.
        if now >= self.introduced_at + _INTRODUCTION_SECONDS:
            self.introduced_at = now
            self.uplink.sent_profile = None
            self.publish_status()

    def announce_state(self) -> None:
        """Announce a new state once it has lasted for a while.

        A small model passes through all states within moments, and the fleet does not need each
        one.
        """
        self.publish_status(with_state=not self.uplink.sent_state)
        if self.uplink.sent_state != self.state.value:
            self.status_at = time.monotonic() + _LASTING_SECONDS

    # The operator's conditions.

    def check_conditions(self) -> None:
        """Check the operator's conditions; if one does not hold, give the current task back."""
        self.watch.ticks.fresh = self._count_new_samples()
        paused_before = self.measurements.paused
        paused = self.watch.check(time.monotonic())
        self.measurements.paused = paused
        changed = paused != paused_before
        if changed:
            self.measurements.refresh(self.services.config.conditions.sysfs)
            self.services.journal.warning(
                paused or "no longer paused: the conditions are met again"
            )
        if paused and self.state in _GIVEN_BACK:
            self.failure = (RefusalReason.BUSY, paused)
            self.post(Event.FAILED)
        elif changed and self.state is State.IDLE:
            self.publish_status()

    def _count_new_samples(self) -> int | None:
        """Count the samples that no finished task has used; None if no condition needs it.

        Between tasks, changed sample files are read again first.
        """
        if self.setup is None or self.services.config.conditions.new_data is None:
            return None
        if self.task is None:
            self.setup = self.services.samples.refresh(self.setup)
        return len(self.setup.data) - self.services.memory.learnt.samples
