"""The coordinator: rounds of one run, from wherever the store says that the run is.

Every step is repeatable. What a killed server had begun is found in the state of its newest round (`machine`) and the
phases of its tasks; plans are functions of what is stored, updates are on disk, so the round goes on as it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from broker_server.accounting import wire_since
from broker_server.collecting import Collection, Decision, Verdict, decide
from broker_server.evaluation import Evaluator
from broker_server.fleet import Assignment, assign, choose
from broker_server.folding import Folding
from broker_server.judging import Judge, Judgement
from broker_server.machine import FINAL, RoundEvent, RoundState
from broker_server.merging import begin_folding, make_version
from broker_server.planning import RunContext, open_collection, plan_round
from broker_server.ports import Asking
from broker_server.retention import drop_old_weights
from broker_server.store import RoundRecord, Store, TaskPhase, TaskRecord, VersionRecord
from fleet_protocol import control
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.errors import ShoalError, StorageError, TransportError
from fleet_protocol.link import WireCount

__all__ = ["Coordinator", "Services"]


@dataclass(frozen=True)
class Services:
    """What a coordinator works with.

    Attributes:
        desk: waits and answers.
        store: the database.
        blobs: global versions, slices and statistics.
        updates: what devices sent.
        forget: called with the id of every task that is over, to drop what came of its update.
        upload_bytes: reads the payload bytes of the updates taken since the last call.
        wire: reads the connection's byte counters.
    """

    desk: Asking
    store: Store
    blobs: BlobStore
    updates: BlobStore
    forget: Callable[[str], None]
    upload_bytes: Callable[[], int]
    wire: Callable[[], WireCount]


class Coordinator:
    """Runs the rounds of one run.

    Args:
        context: the run; its record and initial version are in the store.
        services: what to work with.
        evaluator: the eval graph with the test set, or None.
        beside: evaluators of further tiers.
    """

    def __init__(
        self,
        context: RunContext,
        services: Services,
        evaluator: Evaluator | None,
        beside: Sequence[Evaluator] = (),
    ) -> None:
        self._context = context
        self._services = services
        self._desk = services.desk
        self._store = services.store
        self._reporter = services.desk.reporter
        self._wire = services.wire()
        self._judge = Judge(context, evaluator, services.desk, services.store, services.blobs, services.updates, beside)
        self._round_began = time.monotonic()

    # The run.

    def run(self) -> control.RunFinished:
        """Close the configured number of rounds.

        Returns:
            How the run ended; a failure is committed and reported, not raised.

        Raises:
            StopRequested: the server shall end; the run stays unfinished and is continued by the next server.
        """
        last = self._store.last_round(self._context.run)
        if last is not None and last.state in FINAL:
            self._tidy(last, self._store.tasks(last.run, last.number))  # an earlier server may have died before it did
        try:
            while (version := self._version()).number < self._context.config.round.rounds:
                self._round(version)
        except ShoalError as error:
            return self._end("failed", str(error), error.exit_code)
        return self._end("finished", None, 0)

    def stopped(self) -> control.RunFinished:
        """Tell that the server ends in the middle; the store still says that the run is going on."""
        self._count_bytes()
        finished = self._finished("stopped", "the server was stopped; start it again to go on", 0)
        self._reporter.emit(finished, "the server was stopped")
        return finished

    def _version(self) -> VersionRecord:
        version = self._store.version(self._context.run)
        if version is None:
            raise StorageError(f"run {self._context.run} has no global version in the store")
        return version

    def _round(self, version: VersionRecord) -> None:
        """Take the newest round to its end, or plan the next one first."""
        record = self._store.last_round(self._context.run)
        if record is None or record.state in FINAL:
            self._check_retries()
            record = self._plan(version, 1 if record is None else record.number + 1)
        folding: Folding | None = None
        self._round_began = time.monotonic()
        if record.state is not RoundState.MERGING:
            record, folding = self._collect(record)
        if record.state is RoundState.MERGING:
            self._merge(record, folding)

    def _check_retries(self) -> None:
        rounds = self._store.rounds(self._context.run)
        retries = self._context.config.round.retries
        tail = rounds[-retries:]
        if len(tail) == retries and all(item.state is RoundState.ABANDONED for item in tail):
            raise TransportError(f"{retries} rounds in a row were abandoned, the last because: {tail[-1].reason}")

    def _end(self, status: str, error: str | None, exit_code: int) -> control.RunFinished:
        self._count_bytes()
        self._store.end_run(self._context.run, status, error)
        finished = self._finished(status, error, exit_code)
        self._reporter.emit(finished, f"the run {status}" + (f": {error}" if error else ""))
        return finished

    def _finished(self, status: str, error: str | None, exit_code: int) -> control.RunFinished:
        version = self._version()
        record = self._store.run(self._context.run)
        return control.RunFinished.model_validate(
            {
                "run": self._context.run,
                "seconds": self._reporter.seconds,
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
        now = self._services.wire()
        payload = self._desk.blobs.take_payload_bytes() + self._services.upload_bytes()
        self._store.add_bytes(self._context.run, wire=wire_since(now, self._wire), payload=payload)
        self._wire = now

    # Planning.

    def _plan(self, version: VersionRecord, number: int) -> RoundRecord:
        eligible = self._wait_for_devices(version)
        config = self._context.config
        chosen = choose(
            eligible,
            fraction=config.round.fraction,
            least=config.round.min_devices,
            seed=config.seed,
            number=number,
        )
        record, tasks = plan_round(self._context, chosen, version, number, self._services.blobs)
        self._store.plan_round(record, tasks)
        return record

    def _wait_for_devices(self, version: VersionRecord) -> dict[str, Assignment]:
        config = self._context.config
        deadline = time.monotonic() + config.round.wait_seconds
        told: tuple[str, ...] | None = None
        while True:
            eligible = assign(
                self._desk.fleet.profiles(),
                self._context.tiers,
                config.tiers,
                seed=config.seed,
                version=version.number,
            )
            if len(eligible) >= config.round.min_devices:
                return eligible
            online = self._desk.fleet.online
            if told != online:
                told = online
                self._reporter.emit(
                    control.FleetChanged(
                        run=self._context.run,
                        seconds=self._reporter.seconds,
                        online=online,
                        eligible=len(eligible),
                        needed=config.round.min_devices,
                    )
                )
            if time.monotonic() >= deadline:
                raise TransportError(
                    f"{len(eligible)} eligible devices after {config.round.wait_seconds:g} s, "
                    f"{config.round.min_devices} needed; {len(online)} online: {', '.join(online) or 'none'}. "
                    "Are the devices started, on this broker and in this fleet, and can they train one of the tiers "
                    f"{', '.join(item.tier.id for item in self._context.tiers)}?"
                )
            self._desk.pump(deadline)

    # Collecting.

    def _collect(self, record: RoundRecord) -> tuple[RoundRecord, Folding]:
        config = self._context.config.round
        tasks = self._store.tasks(record.run, record.number, "train")
        collection = open_collection(
            self._context,
            tasks,
            kind="train",
            quorum=record.quorum,
            closed_rounds=record.version,
            # After a restart the full time: how long the server was away says nothing about the devices.
            deadline=time.monotonic() + config.deadline_seconds,
        )
        folding = begin_folding(
            self._context, tasks, lambda task: collection.tasks[task].record, self._services.updates
        )
        self._desk.blobs.serve({digest: self._services.blobs.path(digest) for digest in _slices(tasks)})
        if record.state is RoundState.PLANNED:
            record = self._store.advance_round(record, RoundEvent.ANNOUNCE)
        self._reporter.emit(
            control.RoundStarted(
                run=record.run,
                seconds=self._reporter.seconds,
                round=record.number,
                version=record.version,
                devices={task.device: task.tier for task in tasks},
                deadline_seconds=config.deadline_seconds,
            ),
            f"{len(tasks)} devices asked, {record.quorum} needed",
        )
        self._desk.open(collection)
        if record.state is RoundState.OPEN:
            record = self._store.advance_round(record, RoundEvent.ANNOUNCED)
        decision = self._wait_for_updates(collection, folding)
        if decision.verdict is Verdict.SHORT:
            return self._abandon(record, decision.reason), folding
        record = self._store.advance_round(record, RoundEvent.ENOUGH)
        self._desk.close(f"round {record.number} is closed")
        return record, folding

    def _wait_for_updates(self, collection: Collection, folding: Folding) -> Decision:
        while True:
            phases = collection.phases()
            folding.advance(phases)
            decision = decide(
                list(phases.values()),
                quorum=collection.quorum,
                now=time.monotonic(),
                deadline=collection.deadline,
            )
            if decision.verdict is not Verdict.WAIT:
                return decision
            self._desk.pump(collection.deadline)

    def _abandon(self, record: RoundRecord, reason: str) -> RoundRecord:
        record = self._store.advance_round(record, RoundEvent.GIVE_UP, reason=reason)
        self._desk.close(f"round {record.number} is abandoned")
        self._count_bytes()
        retries = self._context.config.round.retries
        tail = self._store.rounds(record.run)[-retries:]
        again = len(tail) < retries or any(item.state is not RoundState.ABANDONED for item in tail)
        self._reporter.emit(
            control.RoundAbandoned(
                run=record.run, seconds=self._reporter.seconds, round=record.number, reason=reason, again=again
            ),
            f"abandoned: {reason}",
        )
        self._tidy(record, self._store.tasks(record.run, record.number))
        return record

    # Merging.

    def _merge(self, record: RoundRecord, folding: Folding | None) -> None:
        tasks = self._store.tasks(record.run, record.number, "train")
        version = self._store.version(record.run, record.version + 1)
        if version is None:
            by_id = {task.id: task for task in tasks}
            folding = folding or begin_folding(self._context, tasks, by_id.__getitem__, self._services.updates)
            folding.advance({task.id: task.phase for task in tasks})
            old = self._store.version(record.run, record.version)
            if old is None:
                raise StorageError(f"global version {record.version} of run {record.run} is not in the store")
            version = make_version(self._context, record.number, old, folding, self._store, self._services.blobs)
            if version is None:
                self._abandon(record, "the merged weights are not finite")
                return
        judgement = self._judge.judge(record, version)
        self._close(record, version, judgement)

    def _close(self, record: RoundRecord, version: VersionRecord, judgement: Judgement) -> None:
        record = self._store.advance_round(
            record, RoundEvent.MERGED, evaluation=judgement.evaluation, note=judgement.note
        )
        self._count_bytes()
        tasks = self._store.tasks(record.run, record.number)
        trained = [task for task in tasks if task.kind == "train"]
        run = self._store.run(record.run)
        found = judgement.evaluation
        shown = found.summary if found else judgement.note or "not evaluated"
        merged = {task.device: task.tier for task in trained if task.phase is TaskPhase.MERGED}
        self._reporter.emit(
            control.RoundClosed(
                run=record.run,
                seconds=self._reporter.seconds,
                round=record.number,
                version=version.number,
                merged=merged,
                missing=tuple(task.device for task in trained if task.phase is not TaskPhase.MERGED),
                evaluation=found,
                note=judgement.note,
                round_seconds=time.monotonic() - self._round_began,
                wire_bytes=run.wire_bytes if run is not None else 0,
                payload_bytes=run.payload_bytes if run is not None else 0,
            ),
            f"version {version.number} from {len(merged)} updates; {shown}",
        )
        self._tidy(record, tasks)

    # What is over.

    def _tidy(self, record: RoundRecord, tasks: Sequence[TaskRecord]) -> None:
        """Forget what only a round that is over needed: slices, updates, states of the server optimizer, old versions.

        Doing it again is no error.
        """
        blobs = self._services.blobs
        versions = self._store.versions(record.run)
        newest = versions[-1]
        # Only the newest state is gone on with, and it may be large.
        states = {item.state_digest for item in versions[-2:] if item.state_digest not in {None, newest.state_digest}}
        slices = _slices(tasks)
        self._desk.blobs.withdraw(slices)
        for digest in (slices | states) - {item.digest for item in versions}:
            blobs.remove(digest)
        for task in tasks:
            self._services.forget(task.id)
            if task.update_digest is not None:
                self._services.updates.remove(task.update_digest)
        drop_old_weights(versions, self._context.config.keep_versions, blobs)


def _slices(tasks: Sequence[TaskRecord]) -> set[str]:
    """Digests of the weights that devices are offered."""
    return {choice.weights.digest for task in tasks for choice in task.choices}
