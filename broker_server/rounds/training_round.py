"""One round of a run, from its plan, or from where a killed server left it, to its end.

Every step is repeatable. The state of the round (`broker_server.store.machine`) and the phases of
its tasks show what a killed server had begun; plans are functions of the store, and updates are on
disk, so the round continues where it was.
"""

import time
from collections.abc import Mapping, Sequence

from broker_server.rounds.collecting import Collection
from broker_server.rounds.collection_end import ClosingRule, Decision
from broker_server.rounds.dispatch import Services, gather
from broker_server.rounds.judging import Judge, Judgement
from broker_server.rounds.new_version import NoVersion, begin_folding, make_version
from broker_server.rounds.planning import open_collection, reported_efficiencies
from broker_server.rounds.round_cleanup import clean_up
from broker_server.rounds.round_records import (
    are_retries_used_up,
    read_version,
    sent_digests,
    training_tasks,
)
from broker_server.rounds.run_context import RunContext
from broker_server.rounds.summing import sum_up
from broker_server.store import RoundRecord, TaskPhase, TaskRecord, VersionRecord
from broker_server.store.machine import FINAL, RoundEvent, RoundState
from broker_server.store.privacy_spent import epsilon_by_round
from broker_server.strategies.traits import Trait
from broker_server.updates.folding import Folding
from fleet_protocol import control
from fleet_protocol.errors import BlobError


class RoundGivenUp(Exception):  # noqa: N818  (not an error of the run, which tries another round)
    """A round cannot make a version."""

    def __init__(self, reason: str, seconds: float | None = None) -> None:
        """Return the error with how long the round has collected, if it has."""
        super().__init__(reason)
        self.reason = reason
        self.seconds = seconds


class TrainingRound:
    """One round of a run, which is planned and has not ended."""

    def __init__(
        self,
        context: RunContext,
        services: Services,
        judge: Judge,
        record: RoundRecord,
        tasks: Sequence[TaskRecord],
    ) -> None:
        self._context = context
        self._services = services
        self._dispatcher = services.dispatcher
        self._store = services.store
        self._reporter = services.dispatcher.reporter
        self._judge = judge
        self._record = record
        self._tasks = tasks
        # None until the collection is open, and after a restart during the merge.
        self._folding: Folding | None = None
        self._asked: Sequence[TaskRecord] = ()  # the tasks with which the collection began
        self._began = time.monotonic()

    def run(self) -> None:
        """Run the round to its end: closed with a new version, or abandoned.

        Raises:
            BlobError: the version from which the round started, or which it has made, cannot be
                read.
            StorageError: the disk is full.
            StopRequested: the server must end; the next one continues the round.
        """
        try:
            self._run_steps()
        except BlobError as error:
            # Once the version exists, a blob that cannot be read is the version itself, and no
            # other round could start from it.
            if not self._has_damaged_updates():
                raise
            self._settle_damaged_updates()
            self._abandon(str(error))

    def _run_steps(self) -> None:
        try:
            # A server that was killed while it merged has all answers already.
            if self._record.state is not RoundState.MERGING:
                self._collect()
            version = self._merge()
        except RoundGivenUp as end:
            self._abandon(end.reason, end.seconds)
            return
        # The version is committed by now: an evaluation that fails costs no training.
        judgement = self._judge.judge(self._record, version)
        self._close(version, judgement)

    # Collecting.

    def _collect(self) -> None:
        """Offer the tasks, and fold updates as they arrive until the round has enough."""
        began = self._dispatcher.now()
        collection = self._open_collection(began)
        self._offer(collection)
        decision = self._gather(collection)
        # Written before the round changes its state: an abandoned round has its timings, too.
        self._store.record_timings(collection.timings())
        seconds = self._dispatcher.now() - began
        if decision.event is None or decision.event is RoundEvent.GIVE_UP:
            raise RoundGivenUp(decision.reason, seconds)
        # Before the round changes its state: boards reveal their shares only while it is open.
        if self._uses_secure_sum:
            failure = sum_up(self._services, collection)
            if failure:
                raise RoundGivenUp(failure, seconds)
        self._record = self._store.advance_round(
            self._record,
            decision.event,
            collect_seconds=seconds,
            waits=self._accepts_late_updates,
        )
        # After the last round no task continues.
        waits = (
            self._accepts_late_updates
            and self._record.version + 1 < self._context.config.round.rounds
        )
        self._dispatcher.close(f"round {self._record.number} is closed", waits=waits)

    def _gather(self, collection: Collection) -> Decision:
        if self._dispatcher.has_begun_sums:
            # A killed server had collected everything, and was opening the sums.
            return Decision(RoundEvent.ANSWERED, self._dispatcher.now())
        return gather(self._dispatcher, collection, self._advance)

    @property
    def _accepts_late_updates(self) -> bool:
        """Return whether devices that have not answered may answer in a later round."""
        return not self._context.keeps(Trait.ONE_VERSION)

    @property
    def _uses_secure_sum(self) -> bool:
        return not self._context.keeps(Trait.SINGLE)

    def _open_collection(self, began: float) -> Collection:
        config = self._context.config.round
        resumed = self._record.state is not RoundState.PLANNED
        # A resumed round gets its full time: the server's downtime says nothing about the devices.
        rule = ClosingRule(
            share=config.quorum,
            wanted=self._record.wanted or len(self._tasks),
            opened=began,
            deadline=began + config.deadline_seconds,
            grace=config.grace,
            settling=self._dispatcher.settling_seconds if resumed else 0.0,
        )
        self._asked = self._tasks
        efficiencies = reported_efficiencies(self._context, self._store, self._record.number)
        collection = open_collection(self._context, self._tasks, rule, efficiencies)
        self._folding = self._begin_folding(collection)
        return collection

    def _begin_folding(self, collection: Collection) -> Folding:
        old = read_version(self._context, self._store, self._record.version)
        return begin_folding(self._context, collection.tasks, self._services, old)

    def _offer(self, collection: Collection) -> None:
        """Send the offers. The store records each state before the devices receive it."""
        blobs = self._services.blobs
        # Blobs first: a device asks for them as soon as it has the offer.
        digests = sent_digests(self._tasks)
        self._dispatcher.blobs.serve({digest: blobs.path(digest) for digest in digests})
        if self._record.state is RoundState.PLANNED:
            self._record = self._store.advance_round(self._record, RoundEvent.ANNOUNCE)
        self._report_start()
        self._dispatcher.open(collection)
        if self._record.state is RoundState.OPEN:
            self._record = self._store.advance_round(self._record, RoundEvent.ANNOUNCED)
        # A simulation, which has no settling time, uses no masks.
        is_restarted = collection.rule.settling > 0
        if self._uses_secure_sum and is_restarted and not self._dispatcher.has_begun_sums:
            raise RoundGivenUp(
                "the server was restarted, and the keys to its sums were only in memory"
            )

    def _advance(self, phases: Mapping[str, TaskPhase]) -> None:
        """Fold the next updates in order when the phases of tasks change."""
        self._judge.record_if_done()
        # Updates of a secure sum cannot be read; their mean is folded after they are added up.
        if self._folding is not None and not self._uses_secure_sum:
            self._folding.advance(phases)

    # Merging.

    def _merge(self) -> VersionRecord:
        """Make the new version, unless a killed server has made it."""
        tasks = self._training_tasks()
        version = self._store.version(self._record.run, self._record.version + 1)
        # Version and outcomes were one commit, so a version that is there is complete.
        if version is None:
            version = self._make_version(tasks)
        if version.number >= self._context.config.round.rounds:
            # After the last round no task continues.
            open_tasks = []
            for task in tasks:
                if not task.phase.answered:
                    open_tasks.append(task.id)
            self._store.settle(open_tasks, TaskPhase.MISSED)
        return version

    def _make_version(self, tasks: Sequence[TaskRecord]) -> VersionRecord:
        old = read_version(self._context, self._store, self._record.version)
        folding = self._folding
        if folding is None:
            # The server was restarted after the collection, so its updates are folded again. The
            # collection is over, so its rule is never used.
            rule = ClosingRule(share=1.0, wanted=1, opened=0.0, deadline=0.0)
            folding = self._begin_folding(open_collection(self._context, tasks, rule))
        phases = {}
        by_id = {}
        for task in tasks:
            phases[task.id] = _final_phase(task)
            by_id[task.id] = task
        folding.advance(phases)
        version = make_version(self._context, self._services, by_id, old, folding)
        if isinstance(version, NoVersion):
            raise RoundGivenUp(version.reason)
        return version

    # The end.

    def _close(self, version: VersionRecord, judgement: Judgement) -> None:
        self._record = self._store.advance_round(
            self._record,
            RoundEvent.MERGED,
            evaluation=judgement.evaluation,
            note=judgement.note,
        )
        self._services.record_traffic(self._context.run)
        trained = self._training_tasks()
        self._report_close(version, judgement, trained)
        self._clean_up(trained)

    def _abandon(self, reason: str, seconds: float | None = None) -> None:
        # No round ends before the version of the previous round is evaluated.
        self._judge.finish()
        self._record = self._store.advance_round(
            self._record,
            RoundEvent.GIVE_UP,
            reason=reason,
            collect_seconds=seconds,
            waits=self._accepts_late_updates,
        )
        number = self._record.number
        self._dispatcher.close(f"round {number} is abandoned", waits=self._accepts_late_updates)
        self._services.record_traffic(self._context.run)
        again = not are_retries_used_up(self._context, self._store)
        self._reporter.emit(
            control.RoundAbandoned(
                **self._reporter.stamp, round=number, reason=reason, again=again
            ),
            f"abandoned: {reason}",
        )
        self._clean_up(self._training_tasks())

    def _clean_up(self, trained: Sequence[TaskRecord]) -> None:
        statistics = self._store.tasks(self._record.run, self._record.number, "statistics")
        clean_up(self._context, self._services, self._record, [*trained, *statistics])

    def _training_tasks(self) -> list[TaskRecord]:
        """Return the training tasks of the round, by device.

        This includes tasks of earlier rounds that were declined or refused in this one, although
        the store no longer lists them for any round.
        """
        tasks = training_tasks(self._context, self._store, self._record.number)
        listed = {task.id for task in tasks}
        for asked in self._asked:
            task = None if asked.id in listed else self._store.task(asked.id)
            if task is not None:
                tasks.append(task)
        return sorted(tasks, key=lambda task: task.device)

    # Damaged updates.

    def _has_damaged_updates(self) -> bool:
        """Return whether an unreadable blob must be an update, because no version is made yet."""
        if self._record.state in FINAL:
            return False
        return self._store.version(self._record.run, self._record.version + 1) is None

    def _settle_damaged_updates(self) -> None:
        """Settle updates that cannot be read, which later rounds would otherwise read again."""
        for task in training_tasks(self._context, self._store, self._record.number):
            if task.phase is TaskPhase.RECEIVED and task.update_digest is not None:
                try:
                    self._services.updates.tensors(task.update_digest)
                except BlobError as error:
                    self._store.settle([task.id], TaskPhase.MISSED, str(error))

    # Reports.

    def _report_start(self) -> None:
        event = control.RoundStarted(
            **self._reporter.stamp,
            round=self._record.number,
            version=self._record.version,
            devices=_tiers(self._tasks),
            deadline_seconds=self._context.config.round.deadline_seconds,
        )
        line = f"{len(self._tasks)} devices asked, {self._record.quorum} needed"
        self._reporter.emit(event, line)

    def _report_close(
        self, version: VersionRecord, judgement: Judgement, trained: Sequence[TaskRecord]
    ) -> None:
        run = self._store.run(self._record.run)
        epsilon = None
        if run is not None:
            epsilon = epsilon_by_round(self._store, run).get(self._record.number)
        merged = []
        missing = []
        for task in trained:
            if task.phase is TaskPhase.MERGED:
                merged.append(task)
            else:
                missing.append(task.device)
        event = control.RoundClosed(
            **self._reporter.stamp,
            round=self._record.number,
            version=version.number,
            merged=_tiers(merged),
            missing=tuple(missing),
            evaluation=judgement.evaluation,
            note=judgement.note,
            round_seconds=time.monotonic() - self._began,
            wire_bytes=run.wire_bytes if run is not None else 0,
            payload_bytes=run.payload_bytes if run is not None else 0,
            epsilon=epsilon,
        )
        count = len(event.merged)
        updates = "update" if count == 1 else "updates"
        line = f"version {version.number} from {count} {updates}; {judgement.summary}"
        if epsilon is not None:
            line = f"{line}; epsilon {epsilon:.4g}"
        self._reporter.emit(event, line)


def _tiers(tasks: Sequence[TaskRecord]) -> dict[str, str]:
    """Return the tier of each device."""
    return {task.device: task.tier for task in tasks}


def _final_phase(task: TaskRecord) -> TaskPhase:
    """Return the phase of a task after the collection: a task without an answer is missed."""
    return task.phase if task.phase.answered else TaskPhase.MISSED
