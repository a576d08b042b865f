"""What the states of the agent share: what it works with, its uplink, and the task in hand."""

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
from device_runtime.agent.measurements import Measurements
from device_runtime.agent.memory import MemoryRecord
from device_runtime.agent.opened_sums import OpenedSums
from device_runtime.agent.refusals import Refusal, refusal_of
from device_runtime.agent.releases import Releases
from device_runtime.agent.sample_files import SampleFiles
from device_runtime.agent.task_in_hand import TaskInHand
from device_runtime.agent.task_store import TaskStore
from device_runtime.agent.uplink import Uplink
from device_runtime.agent.worker import Worker
from device_runtime.conditions import Watch
from device_runtime.settings import DeviceConfig
from device_runtime.training.task import DeviceSetup
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.errors import RefusalReason, RefusedError, StorageError
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import Accept, Offer, Profile

_OUTCOMES_KEPT = 32
_LASTING_SECONDS = 1.0
_REFUSALS_LOGGED = 5
_INTRODUCTION_SECONDS = 2.0  # between two answers
# A paused board gives its task back, but for a finished update, which is worth its upload.
_GIVEN_BACK = {*WORKING} - {State.UPLOADING}


@dataclass(frozen=True)
class AgentServices:
    """What an agent works with from its start to its end."""

    config: DeviceConfig  # the operator's
    inbox: queue.SimpleQueue[Any]  # everything that happens
    journal: Journal  # the log
    blobs: BlobStore  # content-addressed files
    store: TaskStore  # the task record
    cache: Cache  # what the blobs are for
    memory: MemoryRecord  # what was too large for this board
    opened_sums: OpenedSums  # secure sums that are not taken part in again
    worker: Worker  # the thread for long work
    agreement: Agreement  # brings the data into the form of the fleet's contract
    findings: DataFindings  # the findings in the data
    samples: SampleFiles  # reads them again when they change

    @classmethod
    def build(cls, config: DeviceConfig) -> "AgentServices":
        """Return what an agent with a configuration works with."""
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
    """How a task ended here."""

    task: str  # its id
    event: Event
    refusal: Refusal | None = None  # where this board gave it up


@dataclass
class Context:
    """What the agent's loop and its states share.

    Attributes:
        services: what it works with.
        uplink: its messages to the fleet.
        watch: checks the operator's conditions.
        releases: the runtimes of this board.
        measurements: what it has found out.
        state: of the machine; written by the agent's loop alone.
        setup: backend, and data as its reader gave it, from probing on; `services.agreement` makes
            of it what a task takes.
        task: in hand, from the offer to its end.
        pending_offer: it waits until the task in hand is dropped.
        failure: why the task is about to be refused.
        events: posted and not yet handled.
        outcomes: how recent tasks ended.
        refused: number of messages that were not from a member who may send them, by reason.
        staged: digests of the files of artifact sets that are fetched beforehand.
        status_at: ``time.monotonic()`` when the state is announced, if it lasts until then.
        introduced_at: ``time.monotonic()`` of the last answer to a server that asked who this is.
    """

    services: AgentServices
    uplink: Uplink
    watch: Watch
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
        """Post what a state has seen; the loop handles it before anything else from the inbox."""
        self.events.append(event)

    def fail(self, error: Exception) -> None:
        """Give up the task, or without one the release, for a reason that the server will hear."""
        self.failure = refusal_of(error)
        reason, detail = self.failure
        expected = isinstance(error, RefusedError | StorageError)
        is_bug = reason is RefusalReason.FAILED and not expected
        self.services.journal.error(f"failed: {detail}", error if is_bug else None)
        if self.task is not None:
            self.post(Event.FAILED)
        elif self.releases.wanted is not None:
            release, _ref = self.releases.wanted
            with contextlib.suppress(StorageError):  # then it is tried again when it comes again
                self.releases.move("unfit", release.number, detail, sets=bool(release.sets))
            self.publish_status()

    def journal_refusal(self, error: RefusedError) -> None:
        """Count and log a message from nobody who may send it; of many, only some are logged."""
        self.refused[error.reason] += 1
        count = self.refused[error.reason]
        if count <= _REFUSALS_LOGGED or count % 100 == 0:
            self.services.journal.warning(
                f"refused, {error.reason.value} ({count} so far): {error}"
            )

    # The task in hand.

    def need_task(self) -> TaskInHand:
        """Return the task in hand."""
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
        """Make a task the one in hand.

        Where it goes into a secure sum, it gets keys that are in memory alone: after a restart it
        has another part in the sum than before.
        """
        self.task = task
        summing = task.offer.upload.summing
        if summing is not None:
            # It needs cryptography, which takes memory that other tasks of a small board keep.
            from fleet_protocol.secure_sum import Member  # noqa: PLC0415

            weights = task.record.choice.weights
            task.member = Member(self.services.config.device, weights.digest, summing.least)

    def save(self, **changes: object) -> None:
        """Change the task record, on disk first.

        Raises:
            StorageError: the disk is full; record and file are as before.
        """
        task = self.need_task()
        record = task.record.model_copy(update=changes)
        self.services.store.save(record)
        task.record = record

    def blobs_in_use(self) -> set[str]:
        """Return the digests of what must stay on disk."""
        digests: set[str] = set()
        if self.releases.wanted is not None:
            _release, ref = self.releases.wanted
            digests |= {ref.digest, *self.staged}
        if self.task is not None:
            digests |= self.task.blobs_in_use()
        return digests

    # Messages.

    def send(self, kind: type[FrozenModel], **fields: object) -> None:
        """Send a device message about the task in hand, or without one about the release.

        While the broker is away it waits.
        """
        if self.task is None and self.releases.wanted is not None:
            release, _ref = self.releases.wanted
            self.uplink.send(release, kind, **fields)
        else:
            self.uplink.send(self.need_task().offer, kind, **fields)

    def accept(self, lacks: Sequence[str] = ()) -> None:
        """Accept the task in hand, perhaps once more; `lacks` are the blobs that it asks for."""
        task = self.need_task()
        self.send(
            Accept,
            tier=task.announced_tier,
            lacks=lacks,
            keys=None if task.member is None else task.member.keys,
        )

    def publish_status(self, *, with_state: bool = True) -> None:
        """Tell the fleet what this device is, where that has changed, and what it does."""
        profile = None
        # What was measured during a task is told at its end, once.
        between_tasks = self.state is State.IDLE or self.uplink.sent_profile is None
        if between_tasks and self.setup is not None:
            profile = self._profile(self.setup)
        self.uplink.publish_status(self.state.value if with_state else None, profile)
        self.status_at = math.inf

    def publish_profile(self) -> None:
        """Tell the fleet what this device is, also during a task.

        The findings in samples that were read again are due at once.
        """
        self.uplink.publish_status(None, self._profile(self.need_setup()))

    def _profile(self, setup: DeviceSetup) -> Profile | None:
        findings = self.services.findings.find(setup.data)
        reports = self.services.config.report_data
        return self.measurements.profile(
            self.services.config,
            setup.examples,
            self.services.memory,
            self.releases,
            findings if reports else (),
            setup.data.facts.labels_digest if reports else None,
        )

    def introduce(self) -> None:
        """Say again what this device is and what it does, because the server asks for it."""
        now = time.monotonic()
        # Anybody can ask where the fleet has no identities.
        if now >= self.introduced_at + _INTRODUCTION_SECONDS:
            self.introduced_at = now
            self.uplink.sent_profile = None
            self.publish_status()

    def announce_state(self) -> None:
        """Announce a state that begins, once it has lasted.

        A small model goes through all of them at once, of which the fleet need not hear.
        """
        self.publish_status(with_state=not self.uplink.sent_state)
        if self.uplink.sent_state != self.state.value:
            self.status_at = time.monotonic() + _LASTING_SECONDS

    # The operator's conditions.

    def check_conditions(self) -> None:
        """Check the operator's conditions; where one does not hold, give a task in hand back."""
        self.watch.ticks.fresh = self._count_new_samples()
        paused_before = self.measurements.paused
        paused = self.watch.check(time.monotonic())
        self.measurements.paused = paused
        changed = paused != paused_before
        if changed:
            self.measurements.refresh(self.services.config.conditions.sysfs)
            self.services.journal.warning(paused or "no longer paused: the conditions hold again")
        if paused and self.state in _GIVEN_BACK:
            self.failure = (RefusalReason.BUSY, paused)
            self.post(Event.FAILED)
        elif changed and self.state is State.IDLE:
            self.publish_status()

    def _count_new_samples(self) -> int | None:
        """Count the samples that no finished task had; None where no condition needs it.

        Their files are read again when they have changed, between tasks.
        """
        if self.setup is None or self.services.config.conditions.new_data is None:
            return None
        if self.task is None:
            self.setup = self.services.samples.refresh(self.setup)
        return len(self.setup.data) - self.services.memory.learnt.samples
