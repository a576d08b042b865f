"""What the states of the agent share: what it works with, its link side, what it has measured, and
the task in hand.
"""

import contextlib
import math
import queue
import time
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from device_runtime.agent.agreement import Agreement
from device_runtime.agent.cache import Cache
from device_runtime.agent.choosing import able, probe
from device_runtime.agent.data_findings import DataFindings
from device_runtime.agent.journal import Journal
from device_runtime.agent.machine import WORKING, Event, State
from device_runtime.agent.memory import Memory
from device_runtime.agent.refusals import Refusal, refusal_of
from device_runtime.agent.releases import Releases
from device_runtime.agent.task_in_hand import TaskInHand
from device_runtime.agent.task_store import StoredTask, TaskStore
from device_runtime.agent.uplink import Uplink
from device_runtime.agent.worker import Worker
from device_runtime.board import Board, on_battery, runtime_version, temperature
from device_runtime.conditions import Watch
from device_runtime.settings import DeviceConfig
from device_runtime.training.choosers import chooser_of
from device_runtime.training.task import DeviceSetup
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.data import PythonData, load_data
from fleet_protocol.data.positions import describe_positions
from fleet_protocol.data.stamps import Stamps
from fleet_protocol.errors import (
    DataError,
    RefusalReason,
    RefusedError,
    ShoalError,
    StorageError,
)
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import Accept, Offer, Profile

_OUTCOMES_KEPT = 32
_LASTING_SECONDS = 1.0
_REFUSALS_LOGGED = 5
_GIVEN_BACK = {*WORKING} - {State.UPLOADING}  # a finished update is worth its upload


@dataclass
class Measured:
    """Measurements; each is None until it is known."""

    board: Board | None = None  # from probing on
    step_seconds: float | None = None  # mean time of a training step in the last task
    link_bytes_per_second: float | None = None  # of the last download
    # what computed the training steps of the last task, and why that; empty where there is no
    # choice
    provider: str = ""
    unable: str = ""  # why the board cannot train; empty where it can
    paused: str = ""  # why it shall not train now; empty where it may

    def look(self, sysfs: Path) -> None:
        """Read again what changes while a board runs; `sysfs` as of `probe`."""
        if self.board is not None:
            self.board = replace(
                self.board,
                temperature_celsius=temperature(sysfs),
                on_battery=on_battery(sysfs),
            )

    def profile(
        self,
        config: DeviceConfig,
        examples: int,
        memory: Memory,
        releases: Releases,
        findings: tuple[str, ...] = (),
        labels_digest: str | None = None,
    ) -> Profile | None:
        """Build the device's profile; None before the board is measured.

        Args:
            config: the operator's settings.
            examples: number of training samples.
            memory: record of what was too large for the board.
            releases: the board's releases.
            findings: the findings in its data.
            labels_digest: digest of the order of labels that its own table sets.
        """
        board = self.board
        large = memory.too_large
        if board is None:
            return None
        return Profile(
            **vars(board),
            runtime_version=runtime_version(),
            max_width=config.max_width,
            max_depth=config.max_depth,
            examples=examples,
            step_seconds=self.step_seconds,
            link_bytes_per_second=self.link_bytes_per_second,
            provider=self.provider,
            unable=self.unable
            or self.paused
            or ("it fetches a release" if releases.wanted else ""),
            memory_below=large.peak if large else None,
            lowered=large.said if large else None,
            release=releases.record,
            sets=releases.sets,
            findings=findings or None,
            labels_digest=labels_digest,
        )


@dataclass(frozen=True)
class Kit:
    """What an agent works with from its start to its end."""

    config: DeviceConfig  # the operator's
    inbox: queue.SimpleQueue[Any]  # everything that happens
    journal: Journal  # the log
    blobs: BlobStore  # content-addressed files
    store: TaskStore  # the task record
    cache: Cache  # what the blobs are for
    memory: Memory  # what was too large for this board
    worker: Worker  # the thread for long work
    agreement: Agreement  # brings the data into the form of the fleet's contract
    findings: DataFindings  # the findings in the data


@dataclass
class Context:
    """The agent's state beside the state of its machine.

    Attributes:
        kit: what it works with.
        uplink: what it says.
        watch: looks at the operator's conditions.
        releases: the runtimes of this board.
        measured: what it has found out.
        state: of the machine; written by the agent's loop alone.
        setup: backend, and data as its reader gave it, from probing on; `kit.agreement` makes of it
            what a task takes.
        task: in hand, from the offer to its end.
        pending: an offer that waits until the task in hand is dropped.
        failure: why the task is about to be refused.
        events: posted and not yet handled.
        outcomes: how recent tasks ended.
        refused: messages that were not from who may say them, by reason.
        unread: state of the files when reading them again failed; None if it succeeded.
        staged: digests of the files of artifact sets that are fetched beforehand.
        status_at: ``time.monotonic()`` when the state is told to the fleet, if it lasts until then.
    """

    kit: Kit
    uplink: Uplink
    watch: Watch
    releases: Releases
    measured: Measured = field(default_factory=Measured)
    state: State = State.STARTING
    setup: DeviceSetup | None = None
    task: TaskInHand | None = None
    pending: Offer | None = None
    failure: Refusal | None = None
    events: deque[Event] = field(default_factory=deque)
    outcomes: deque[tuple[str, Event, Refusal | None]] = field(
        default_factory=lambda: deque(maxlen=_OUTCOMES_KEPT)
    )
    refused: Counter[RefusalReason] = field(default_factory=Counter)
    unread: Stamps | None = None
    staged: Collection[str] = ()
    status_at: float = math.inf

    def post(self, event: Event) -> None:
        """Tell the loop what a state has seen.

        It is handled before anything else from the inbox.
        """
        self.events.append(event)

    def fail(self, error: Exception) -> None:
        """Give a task up, or the release where none is in hand, for a reason that the server will
        hear.
        """
        self.failure = refusal_of(error)
        bug = self.failure[0] is RefusalReason.FAILED and not isinstance(
            error, RefusedError | StorageError
        )
        self.kit.journal.error(f"failed: {self.failure[1]}", error if bug else None)
        if self.task is not None:
            self.post(Event.FAILED)
        elif self.releases.wanted is not None:
            with contextlib.suppress(StorageError):  # then it is tried again when it is said again
                new = self.releases.wanted[0]
                self.releases.move("unfit", new.number, self.failure[1], sets=bool(new.sets))
            self.publish_status()

    def journal_refusal(self, error: RefusedError) -> None:
        """Count and log a message that nobody who may say it has said.

        Of many, only some are logged.
        """
        self.refused[error.reason] += 1
        count = self.refused[error.reason]
        if count <= _REFUSALS_LOGGED or count % 100 == 0:
            self.kit.journal.warning(f"refused, {error.reason.value} ({count} so far): {error}")

    def need_task(self) -> TaskInHand:
        """The task in hand."""
        if self.task is None:
            raise RuntimeError(
                f"the device in state {self.state.value!r} has no task; this is a bug"
            )
        return self.task

    def need_setup(self) -> DeviceSetup:
        """Data and backend."""
        if self.setup is None:
            raise RuntimeError(
                f"the device in state {self.state.value!r} has not loaded its data; this is a bug"
            )
        return self.setup

    def save(self, **changes: object) -> None:
        """Change the task record, on disk first.

        A StorageError, where that is full, leaves both as before.
        """
        task = self.need_task()
        record = task.record.model_copy(update=changes)
        self.kit.store.save(record)
        task.record = record

    def blobs_in_use(self) -> set[str]:
        """Digests of what must stay on disk."""
        release = (
            set()
            if self.releases.wanted is None
            else {self.releases.wanted[1].digest, *self.staged}
        )
        return release if self.task is None else release | {*self.task.blobs_in_use()}

    def send(self, kind: type[FrozenModel], **fields: object) -> None:
        """Send a device message about the task in hand, or the release.

        While the broker is away it waits.
        """
        wanted = self.releases.wanted if self.task is None else None
        self.uplink.send(
            wanted[0] if wanted is not None else self.need_task().offer, kind, **fields
        )

    def accept(self, lacks: Sequence[str] = ()) -> None:
        """Say, or say again, that the task in hand is taken.

        `lacks` are parts of its choice that it asks for.
        """
        task = self.need_task()
        self.send(
            Accept,
            tier=task.tier_said,
            lacks=lacks,
            keys=None if task.member is None else task.member.keys,
        )

    def publish_status(self, *, does: bool = True) -> None:
        """Tell the fleet what this device is, where that has changed, and what it does."""
        # What was measured during a task is told at its end, once.
        setup = self.setup if self.state is State.IDLE or self.uplink.told is None else None
        profile = None if setup is None else self._profile(setup)
        self.uplink.publish_status(self.state.value if does else None, profile)
        self.status_at = math.inf

    def publish_profile(self) -> None:
        """Tell the fleet what this device is, also during a task: the findings of samples that were
        read again.
        """
        self.uplink.publish_status(None, self._profile(self.need_setup()))

    def _profile(self, setup: DeviceSetup) -> Profile | None:
        findings = self.kit.findings.of(setup.data)
        reports = self.kit.config.report_data
        return self.measured.profile(
            self.kit.config,
            setup.examples,
            self.kit.memory,
            self.releases,
            findings if reports else (),
            setup.data.facts.labels_digest if reports else None,
        )

    def tell_state(self) -> None:
        """Tell the fleet of a state that begins, once it has lasted: a small model goes through all
        of them at once.
        """
        self.publish_status(does=not self.uplink.said)
        if self.uplink.said != self.state.value:
            self.status_at = time.monotonic() + _LASTING_SECONDS

    def look(self) -> None:
        """Look at the operator's conditions.

        Where one does not hold, a task in hand is given back.
        """
        self.watch.ticks.fresh = self._fresh()
        before, self.measured.paused = (
            self.measured.paused,
            self.watch.look(time.monotonic()),
        )
        paused = self.measured.paused
        if paused != before:
            self.measured.look(self.kit.config.conditions.sysfs)
            self.kit.journal.warning(paused or "no longer paused: the conditions hold again")
        if paused and self.state in _GIVEN_BACK:
            self.failure = (RefusalReason.BUSY, paused)
            self.post(Event.FAILED)
        elif paused != before and self.state is State.IDLE:
            self.publish_status()

    def _fresh(self) -> int | None:
        """Samples that no finished task had.

        Their files are read again when they have changed, between tasks.
        """
        config = self.kit.config
        if self.setup is None or config.conditions.new_data is None:
            return None
        if self.task is None:
            self._read_again(self.setup)
        return len(self.setup.data) - self.kit.memory.learnt.samples

    def _read_again(self, setup: DeviceSetup) -> None:
        """Read files that have changed since the last attempt.

        The user's own function is always called.
        """
        config = self.kit.config.data
        stamps = self.unread or setup.data.stamps
        if stamps is None:
            return
        later = stamps.current()
        if not stamps.changes(later) and not isinstance(config, PythonData):
            return
        try:
            self.setup = replace(setup, data=load_data(config))
            self.unread = None
        except (ShoalError, OSError) as error:  # maybe only half of a file is written
            self.unread = later
            self.kit.journal.warning(f"goes on with the samples it has: {error}")

    def hold(self, task: TaskInHand) -> None:
        """Make a task the one in hand.

        After a restart it has another part in a secure sum than before.
        """
        self.task = task
        summing = task.offer.upload.summing
        if summing is not None:
            from fleet_protocol.secure_sum import Member  # noqa: PLC0415  (cryptography: memory of a small board)

            task.member = Member(
                self.kit.config.device, task.record.choice.weights.digest, summing.least
            )

    def _agree(self, offer: Offer) -> None:
        """See that the samples fit an offer.

        Where they do not, look whether somebody has mended their files.
        """
        before = self.need_setup()
        try:
            self.kit.agreement.of(before.data, offer)
        except DataError:
            self._read_again(before)
            if self.setup is before:
                raise
            self.kit.agreement.of(self.need_setup().data, offer)

    def take(self, offer: Offer) -> None:
        """Make an offer the task in hand, or prepare its refusal; posts which."""
        now = time.monotonic()
        config = self.kit.config
        try:
            choices = able(offer, config, self.need_setup())
            problem = None
            self._agree(offer)  # before anything is fetched for it
            self.kit.findings.heard(offer.contract)
            self.publish_status(does=False)  # sends the findings before the offer is accepted
        except (RefusedError, DataError) as error:
            choices = ()
            problem = refusal_of(error)
        if self.measured.paused:
            choices = ()
            problem = (RefusalReason.BUSY, self.measured.paused)
        chooses = len(choices) > 1 and chooser_of(offer) is not None
        choice = probe(choices)[0] if chooses else next(iter(choices), None)
        record = StoredTask(
            phase="fetching",
            offer=offer,
            tier=(choice or offer.choices[0]).tier,
            chosen=not chooses,
            deadline_unix=time.time() + offer.seconds_left,
        )
        self.hold(TaskInHand(record, deadline=now + offer.seconds_left, started=now))
        self.kit.journal.follow(offer)
        if choice is None:
            offered = ", ".join(c.tier for c in offer.choices)
            limit = f"width {config.max_width:g}, depth {config.max_depth or 'any'}"
            limited = (
                RefusalReason.UNSUPPORTED,
                f"offered {offered}; this board is limited to {limit}",
            )
            self.failure = problem or limited
            self.post(Event.UNSUITABLE)
            return
        taken = describe_positions(
            self.need_setup().data, offer.contract, own_labels=bool(offer.stays)
        )
        note = f"; {taken}" if taken else ""
        self.kit.journal.info(
            f"offer {offer.routine} tier={choice.tier} seconds_left={offer.seconds_left:g}{note}"
        )
        self.post(Event.OFFERED)
