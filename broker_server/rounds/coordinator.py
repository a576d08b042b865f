"""The coordinator: rounds of one run, from wherever the store says that the run is.

Every step is repeatable. What a killed server had begun is found in the state of its newest round
(`machine`) and the phases of its tasks; plans are functions of what is stored, updates are on disk,
so the round goes on as it was.
"""

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from broker_server.rounds.best import drop_old_weights, reason_to_stop
from broker_server.rounds.closing import ClosingRule, quorum_size
from broker_server.rounds.dispatch import Services, gather
from broker_server.rounds.evaluators import Evaluators
from broker_server.rounds.judging import Judge, Judgement
from broker_server.rounds.new_version import begin_folding, make_version
from broker_server.rounds.planning import (
    open_collection,
    plan_round,
    require_tiers,
    restore_sent_weights,
    training_tasks,
)
from broker_server.rounds.recruiting import recruit
from broker_server.rounds.run_context import RunContext
from broker_server.rounds.stopping import Halted
from broker_server.rounds.summing import sum_up
from broker_server.store import RoundRecord, TaskPhase, TaskRecord, VersionRecord
from broker_server.store.export import require_whole
from broker_server.store.machine import FINAL, RoundEvent, RoundState
from broker_server.store.privacy_spent import epsilon_by_round
from broker_server.store.promotion import promoted
from broker_server.updates.folding import Folding
from fleet_protocol import control
from fleet_protocol.errors import BlobError, ShoalError, StorageError, TransportError


class Coordinator:
    """Runs the rounds of one run, whose record and initial version are in the store.

    See `require_tiers`.
    """

    def __init__(self, context: RunContext, services: Services, evaluators: Evaluators) -> None:
        require_tiers(context, services.store)
        self._context = context
        self._services = services
        self._dispatcher = services.dispatcher
        self._store = services.store
        self._reporter = services.dispatcher.reporter
        self._judge = Judge(context, services, evaluators)
        self._round_began = time.monotonic()
        self._opened: Sequence[TaskRecord] = ()  # what the newest collection began with

    # The run.

    def run(self) -> control.RunFinished:
        """Close the configured number of rounds.

        Returns:
            How the run ended; a failure is committed and reported, not raised.

        Raises:
            StopRequested: the server shall end; the run stays unfinished and is continued by the
                next server.
        """
        last = self._store.last_round(self._context.run)
        newest = self._version()
        try:
            require_whole(self._services.blobs, newest.number, newest.digest, newest.state_digest)
        except BlobError as error:
            return self._interrupted(error)
        if last is not None and last.state in FINAL:
            self._tidy(last, self._all_tasks(last))  # an earlier server may have died before it did
        try:
            return self._work()
        finally:
            self._judge.close()

    def _work(self) -> control.RunFinished:
        try:
            self._judge.resume()
            while (
                version := self._version()
            ).number < self._context.config.round.rounds or self._in_a_round():
                judging = self._context.config.evaluation
                if (  # a round that is judged, and not yet over, is ended first
                    judging.patience
                    and not self._in_a_round()
                    and (why := reason_to_stop(judging, self._store.versions(self._context.run)))
                    is not None
                ):
                    return self._end("finished", None, 0, why)
                try:
                    self._round(version)
                except Halted:
                    if not self._hold():
                        return self._end("stopped", "stopped by its operator", 0)
            return self._end("finished", None, 0)
        except (StorageError, OSError) as error:
            return self._interrupted(error)
        except ShoalError as error:
            with contextlib.suppress(ShoalError):
                self._judge.finish()
            return self._end("failed", str(error), error.exit_code)

    def _hold(self) -> bool:
        """Wait as long as the operator wants the run held; False if it is over then."""
        operator = self._dispatcher.operator
        self._judge.finish()
        if operator.wish == "pause":
            self._store.set_status(self._context.run, "paused")
        while operator.wish == "pause":
            self._dispatcher.pump(math.inf)
        if operator.wish == "go":
            self._store.set_status(self._context.run, "running")
        return operator.wish == "go"

    def stopped(self) -> control.RunFinished:
        """Tell that the server ends in the middle.

        The store still says that the run is going on.
        """
        self._count_bytes()
        finished = self._finished("stopped", "the server was stopped; start it again to go on", 130)
        self._reporter.emit(finished, "the server was stopped")
        self._store.flush()
        return finished

    def _interrupted(self, error: StorageError | OSError | BlobError) -> control.RunFinished:
        """The disk does not take or give something, or the broker is gone: what the run lacks is
        done again.
        """
        told = f"{error}; the run is not over: give it again, and it goes on (`shoal up` does so by itself)"
        kind = TransportError if isinstance(error, ConnectionError) else StorageError
        finished = self._finished("stopped", told, kind.exit_code)
        self._reporter.emit(finished)  # without a line of the log, which could not be written
        return finished

    def _in_a_round(self) -> bool:
        """Whether a round is not over yet: the last one, whose version is made, may still have to
        be judged.
        """
        last = self._store.last_round(self._context.run)
        return last is not None and last.state not in FINAL

    def _version(self, number: int | None = None) -> VersionRecord:
        version = self._store.version(self._context.run, number)
        if version is None:
            which = "no global version" if number is None else f"no global version {number}"
            raise StorageError(f"run {self._context.run} has {which} in the store")
        return version

    def _round(self, version: VersionRecord) -> None:
        """Take the newest round to its end, or plan the next one first."""
        record = self._store.last_round(self._context.run)
        if record is None or record.state in FINAL:
            self._dispatcher.operator.require_go()
            if record is not None and self._all_abandoned():
                retries = self._context.config.round.retries
                raise TransportError(
                    f"{retries} rounds in a row were abandoned, the last because: {record.reason}"
                )
            record, tasks = self._plan(version, 1 if record is None else record.number + 1)
        else:
            tasks = training_tasks(self._context, self._store, record.number)
            restore_sent_weights(self._context, tasks, self._version, self._services.blobs)
        folding: Folding | None = None
        self._round_began = time.monotonic()
        try:
            if record.state is not RoundState.MERGING:
                record, folding = self._collect(record, tasks)
            if record.state is RoundState.MERGING:
                self._merge(record, folding)
        except (
            BlobError
        ) as error:  # a stored update was damaged; of another round there will be others
            last = self._store.last_round(record.run)
            if (
                last is None
                or last.state in FINAL
                or self._store.version(record.run, last.version + 1) is not None
            ):
                raise
            self._drop_damaged(last)
            self._abandon(last, str(error))

    def _drop_damaged(self, record: RoundRecord) -> None:
        """Settle updates that cannot be read, or later rounds that they wait for would trip over
        them as well.
        """
        for task in training_tasks(self._context, self._store, record.number):
            if task.phase is TaskPhase.RECEIVED and task.update_digest is not None:
                try:
                    self._services.updates.tensors(task.update_digest)
                except BlobError as error:
                    self._store.settle([task.id], TaskPhase.MISSED, str(error))

    def _all_abandoned(self) -> bool:
        """Whether so many rounds in a row were abandoned that no other is tried."""
        retries = self._context.config.round.retries
        tail = self._store.rounds(self._context.run, last=retries)
        return len(tail) == retries and all(item.state is RoundState.ABANDONED for item in tail)

    def _end(
        self, status: str, error: str | None, exit_code: int, early: str | None = None
    ) -> control.RunFinished:
        self._count_bytes()
        last = self._store.last_round(self._context.run)
        if last is not None and last.state in FINAL and (late := self._waiting(last)):
            self._store.settle(
                [task.id for task in late],
                TaskPhase.MISSED,
                "the run ended before it counted",
            )
            self._dispatcher.close("the run is over")
            self._tidy(last, late)
        self._store.end_run(self._context.run, status, error or early)
        finished = self._finished(status, error, exit_code).model_copy(update={"early": early})
        self._reporter.emit(
            finished,
            f"the run {status}" + (f": {error or early}" if error or early else ""),
        )
        self._store.flush()
        return finished

    def _finished(self, status: str, error: str | None, exit_code: int) -> control.RunFinished:
        version = self._version()
        record = self._store.run(self._context.run)
        return control.RunFinished.model_validate(
            {
                **self._reporter.stamp,
                "status": status,
                "version": version.number,
                "rounds": version.number,
                "evaluation": version.evaluation,
                "wire_bytes": record.wire_bytes if record is not None else 0,
                "payload_bytes": record.payload_bytes if record is not None else 0,
                "error": error,
                "exit_code": exit_code,
            }
        )

    def _count_bytes(self) -> None:
        self._reporter.count()
        count = self._dispatcher.count_bytes()
        self._store.add_bytes(self._context.run, wire=count.wire, payload=count.payload)

    def _waiting(self, record: RoundRecord) -> list[TaskRecord]:
        """Tasks that go on beyond the newest round."""
        return training_tasks(self._context, self._store, record.number + 1)

    def _all_tasks(self, record: RoundRecord) -> list[TaskRecord]:
        """All tasks that the newest round has to do with."""
        return [
            *self._trained(record),
            *self._store.tasks(record.run, record.number, "statistics"),
        ]

    def _trained(self, record: RoundRecord) -> list[TaskRecord]:
        """With those of earlier rounds that were declined or refused in this one, and are no
        round's any more.
        """
        tasks = training_tasks(self._context, self._store, record.number)
        known = {task.id for task in tasks}
        gone = [self._store.task(task.id) for task in self._opened if task.id not in known]
        return sorted(
            [*tasks, *(task for task in gone if task is not None)],
            key=lambda task: task.device,
        )

    # Planning.

    def _plan(self, version: VersionRecord, number: int) -> tuple[RoundRecord, list[TaskRecord]]:
        recruits = recruit(self._context, self._services, version.number, number)
        record, tasks, lost = plan_round(
            self._context, recruits.chosen, version, number, self._services.blobs
        )
        quorum = quorum_size(self._context.config.round.quorum, recruits.wanted)
        record = replace(record, quorum=quorum, wanted=recruits.wanted, left_out=recruits.left_out)
        self._store.plan_round(record, tasks)
        if (encoding := self._context.config.download.encoding) != "fp32":
            detail = f"weights travel in {encoding}, which takes {lost:.3%} of their norm at most"
            self._reporter.note("download", detail, number)
        alone = self._context.config.round.buffer is None
        return record, tasks if alone else training_tasks(self._context, self._store, number)

    # Collecting.

    def _collect(self, record: RoundRecord, tasks: list[TaskRecord]) -> tuple[RoundRecord, Folding]:
        config = self._context.config.round
        summing = self._context.config.secure_sum is not None
        # After a restart the full time: how long the server was away says nothing about the
        # devices.
        now = self._dispatcher.now()
        resumed = record.state is not RoundState.PLANNED
        rule = ClosingRule(
            share=config.quorum,
            wanted=record.wanted or len(tasks),
            opened=now,
            deadline=now + config.deadline_seconds,
            grace=config.grace,
            settling=self._dispatcher.settling_seconds if resumed else 0.0,
        )
        self._opened, collection = tasks, open_collection(self._context, tasks, rule)
        folding = begin_folding(
            self._context,
            collection.tasks,
            self._services,
            self._version(record.version),
        )
        self._dispatcher.blobs.serve(
            {digest: self._services.blobs.path(digest) for digest in _slices(tasks)}
        )
        if not resumed:
            record = self._store.advance_round(record, RoundEvent.ANNOUNCE)
        self._reporter.emit(
            control.RoundStarted(
                **self._reporter.stamp,
                round=record.number,
                version=record.version,
                devices={task.device: task.tier for task in tasks},
                deadline_seconds=config.deadline_seconds,
            ),
            f"{len(tasks)} devices asked, {record.quorum} needed",
        )
        self._dispatcher.open(collection)
        if record.state is RoundState.OPEN:
            record = self._store.advance_round(record, RoundEvent.ANNOUNCED)
        if summing and rule.settling:  # of a fleet; in a simulation there are no masks
            return self._abandon(
                record,
                "the server was restarted, and had the keys to its sums in memory",
            ), folding

        def advance(phases: Mapping[str, TaskPhase]) -> None:
            self._judge.record_if_done()
            if not summing:  # updates that nobody sees are folded when they are added up
                folding.advance(phases)

        decision = gather(self._dispatcher, collection, advance)
        self._store.record_timings(collection.timings())
        seconds = self._dispatcher.now() - now
        waits = config.buffer is not None
        if decision.event is None or decision.event is RoundEvent.GIVE_UP:
            return self._abandon(record, decision.reason, seconds), folding
        lost = sum_up(self._services, collection) if summing else ""
        if lost:
            return self._abandon(record, lost, seconds), folding
        record = self._store.advance_round(
            record, decision.event, collect_seconds=seconds, waits=waits
        )
        waits = waits and record.version + 1 < config.rounds
        self._dispatcher.close(f"round {record.number} is closed", waits=waits)
        return record, folding

    def _abandon(
        self, record: RoundRecord, reason: str, seconds: float | None = None
    ) -> RoundRecord:
        waits = self._context.config.round.buffer is not None
        self._judge.finish()
        event = RoundEvent.GIVE_UP
        record = self._store.advance_round(
            record, event, reason=reason, collect_seconds=seconds, waits=waits
        )
        self._dispatcher.close(f"round {record.number} is abandoned", waits=waits)
        self._count_bytes()
        again = not self._all_abandoned()
        self._reporter.emit(
            control.RoundAbandoned(
                **self._reporter.stamp, round=record.number, reason=reason, again=again
            ),
            f"abandoned: {reason}",
        )
        self._tidy(record, self._all_tasks(record))
        return record

    # Merging.

    def _merge(self, record: RoundRecord, folding: Folding | None) -> None:
        tasks = self._trained(record)
        version = self._store.version(record.run, record.version + 1)
        if version is None:
            by_id = {task.id: task for task in tasks}
            old = self._version(record.version)
            if folding is None:
                again = open_collection(self._context, tasks, ClosingRule(1.0, 1, 0.0, 0.0))
                folding = begin_folding(self._context, again.tasks, self._services, old)
            folding.advance(
                {task.id: task.phase if task.phase.answered else TaskPhase.MISSED for task in tasks}
            )
            made = make_version(self._context, self._services, by_id, old, folding)
            if isinstance(made, str):
                self._abandon(record, made)
                return
            version = made
        if version.number >= self._context.config.round.rounds:  # nobody goes on beyond the last
            self._store.settle(
                [task.id for task in tasks if not task.phase.answered], TaskPhase.MISSED
            )
        self._close(record, version, self._judge.judge(record, version))

    def _close(self, record: RoundRecord, version: VersionRecord, judgement: Judgement) -> None:
        record = self._store.advance_round(
            record,
            RoundEvent.MERGED,
            evaluation=judgement.evaluation,
            note=judgement.note,
        )
        self._count_bytes()
        tasks = self._all_tasks(record)
        trained = [task for task in tasks if task.kind == "train"]
        run = self._store.run(record.run)
        found = judgement.evaluation
        epsilon = None if run is None else epsilon_by_round(self._store, run).get(record.number)
        merged = {task.device: task.tier for task in trained if task.phase is TaskPhase.MERGED}
        self._reporter.emit(
            control.RoundClosed(
                **self._reporter.stamp,
                round=record.number,
                version=version.number,
                merged=merged,
                missing=tuple(
                    task.device for task in trained if task.phase is not TaskPhase.MERGED
                ),
                evaluation=found,
                note=judgement.note,
                round_seconds=time.monotonic() - self._round_began,
                wire_bytes=run.wire_bytes if run is not None else 0,
                payload_bytes=run.payload_bytes if run is not None else 0,
                epsilon=epsilon,
            ),
            f"version {version.number} from {len(merged)} updates; {judgement.summary}"
            + ("" if epsilon is None else f"; epsilon {epsilon:.4g}"),
        )
        self._tidy(record, tasks)

    # What is over.

    def _tidy(self, record: RoundRecord, tasks: Sequence[TaskRecord]) -> None:
        """Forget what only a round that is over needed: slices, updates, states of the server
        optimizer, old versions.

        Doing it again is no error.
        """
        waiting = self._waiting(record)
        tasks = [task for task in tasks if task.id not in {item.id for item in waiting}]
        blobs = self._services.blobs
        *before, newest = self._store.versions(record.run, last=2)
        # Only the newest state is gone on with, and it may be large.
        states = {
            item.state_digest
            for item in before
            if item.state_digest not in {None, newest.state_digest}
        }
        slices = _slices(tasks) - _slices(waiting)
        self._dispatcher.blobs.withdraw(slices)
        over = slices | states
        for digest in over - self._store.used_blobs(over) - _slices(waiting):
            blobs.remove(digest)
        for task in tasks:
            self._dispatcher.forget(task.id)
            if task.update_digest is not None:
                self._services.updates.remove(task.update_digest)
        if self._context.config.keep_versions is not None:
            versions = self._store.versions(record.run)
            kept = promoted(self._store, record.run)
            used = self._store.used_blobs(
                {item.digest for item in versions}, beside=record.run
            ) | _slices(waiting)
            used |= set() if kept is None else {kept.digest}
            drop_old_weights(
                versions,
                self._context.config.keep_versions,
                blobs,
                used,
                self._context.config.evaluation,
            )


def _slices(tasks: Sequence[TaskRecord]) -> set[str]:
    """Digests of the weights that devices are offered."""
    return {choice.weights.digest for task in tasks for choice in task.choices}
