"""Runs the rounds of one run, starting from the state in the store.

The loop is `Coordinator._run_rounds`; `broker_server.rounds.training_round` runs each round.
"""

import contextlib
import math
from dataclasses import replace

from broker_server.rounds.best import reason_to_stop
from broker_server.rounds.collection_end import quorum_size
from broker_server.rounds.dispatch import Services
from broker_server.rounds.evaluators import Evaluators
from broker_server.rounds.judging import Judge
from broker_server.rounds.planning import plan_round, require_tiers
from broker_server.rounds.recruiting import recruit
from broker_server.rounds.round_cleanup import clean_up
from broker_server.rounds.round_records import are_retries_used_up, read_version, training_tasks
from broker_server.rounds.run_context import RunContext
from broker_server.rounds.sent_weights import restore_sent_weights
from broker_server.rounds.stopping import RunHalted
from broker_server.rounds.training_round import TrainingRound
from broker_server.store import RoundRecord, TaskPhase, queries
from broker_server.store.export import require_whole
from broker_server.store.machine import FINAL
from broker_server.strategies.traits import Trait
from fleet_protocol import control
from fleet_protocol.errors import BlobError, ShoalError, StorageError, TransportError

_INTERRUPTED = 130  # exit code of a program that Ctrl-C ended


class Coordinator:
    """Runs the rounds of one run whose record and initial version are in the store."""

    def __init__(self, context: RunContext, services: Services, evaluators: Evaluators) -> None:
        """Prepare the run.

        Raises:
            ConfigError: a tier that devices are training is no longer exported.
        """
        require_tiers(context, services.store)
        self._context = context
        self._services = services
        self._dispatcher = services.dispatcher
        self._store = services.store
        self._reporter = services.dispatcher.reporter
        self._judge = Judge(context, services, evaluators)

    def run(self) -> control.RunFinished:
        """Run rounds until the configured number is closed.

        Returns:
            How the run ended; a failure is stored and reported, not raised.

        Raises:
            StopRequested: the server must end; the run stays unfinished and the next server
                continues it.
        """
        newest = read_version(self._context, self._store)
        try:
            require_whole(self._services.blobs, newest.number, newest.digest, newest.state_digest)
        except BlobError as error:
            return self._interrupted(error)
        self._clean_up_newest_round()
        try:
            return self._run_rounds()
        finally:
            self._judge.close()

    def stopped(self) -> control.RunFinished:
        """Report that the server ends during a run; the run continues with the next server."""
        self._services.record_traffic(self._context.run)
        finished = self._finished(
            "stopped", "the server was stopped; start it again to continue", _INTERRUPTED
        )
        self._reporter.emit(finished, "the server was stopped")
        self._store.flush()
        return finished

    # The rounds.

    def _run_rounds(self) -> control.RunFinished:
        try:
            self._judge.resume()
            while self._has_rounds_left():
                early = self._reason_to_end_early()
                if early is not None:
                    return self._end("finished", early=early)
                try:
                    self._next_round().run()
                except RunHalted:
                    self._hold()
                    if self._dispatcher.operator.wish != "go":
                        return self._end("stopped", "stopped by its operator")
            return self._end("finished")
        except (StorageError, OSError) as error:
            return self._interrupted(error)
        except ShoalError as error:
            # The run has already failed: a failure of its last evaluation would hide the reason.
            with contextlib.suppress(ShoalError):
                self._judge.finish()
            return self._end("failed", str(error), error.exit_code)

    def _has_rounds_left(self) -> bool:
        """Return whether there is a round to plan or to continue.

        The last version may exist while its round must still evaluate it.
        """
        version = read_version(self._context, self._store)
        return version.number < self._context.config.round.rounds or self._is_in_round()

    def _is_in_round(self) -> bool:
        last = self._store.last_round(self._context.run)
        return last is not None and last.state not in FINAL

    def _reason_to_end_early(self) -> str | None:
        """Return why the run ends before its last round; None while it continues.

        An open round is finished first.
        """
        config = self._context.config.evaluation
        if not config.patience or self._is_in_round():
            return None
        return reason_to_stop(config, self._store.versions(self._context.run))

    def _next_round(self) -> TrainingRound:
        """Return the round that a killed server left open, or plan the next one.

        Raises:
            Halted: the operator has stopped or held the run.
            TransportError: too many rounds were abandoned, or too few devices are online.
        """
        last = self._store.last_round(self._context.run)
        if last is None or last.state in FINAL:
            self._dispatcher.operator.require_go()
            self._require_retries(last)
            return self._plan_round(1 if last is None else last.number + 1)
        return self._resume_round(last)

    def _require_retries(self, last: RoundRecord | None) -> None:
        if last is not None and are_retries_used_up(self._context, self._store):
            retries = self._context.config.round.retries
            raise TransportError(
                f"{retries} rounds in a row were abandoned, the last one because: {last.reason}"
            )

    def _plan_round(self, number: int) -> TrainingRound:
        """Choose the devices of a round, cut their weights, and store the plan."""
        context = self._context
        version = read_version(context, self._store)
        # The version of the round before is judged meanwhile, however long the devices take.
        recruits = recruit(
            context, self._services, version.number, number, self._judge.record_if_done
        )
        plan = plan_round(context, recruits.chosen, version, number, self._services.blobs)
        # A quorum is a share of the wanted updates; more devices than that may be selected.
        record = replace(
            plan.record,
            quorum=quorum_size(context.config.round.quorum, recruits.wanted),
            wanted=recruits.wanted,
            left_out=recruits.left_out,
        )
        self._store.plan_round(record, plan.tasks)
        self._note_rounding_loss(plan.rounding_loss, number)
        tasks = plan.tasks
        if not context.keeps(Trait.ONE_VERSION):
            # The round also accepts updates from devices that were selected in earlier rounds.
            tasks = training_tasks(context, self._store, number)
        return TrainingRound(context, self._services, self._judge, record, tasks)

    def _note_rounding_loss(self, loss: float, number: int) -> None:
        encoding = self._context.config.download.encoding
        if encoding != "fp32":
            detail = f"weights are sent in {encoding}, which loses at most {loss:.3%} of their norm"
            self._reporter.note("download", detail, number)

    def _resume_round(self, record: RoundRecord) -> TrainingRound:
        context = self._context
        tasks = training_tasks(context, self._store, record.number)
        restore_sent_weights(context, self._store, tasks, self._services.blobs)
        return TrainingRound(context, self._services, self._judge, record, tasks)

    def _hold(self) -> None:
        """Wait while the operator holds the run."""
        operator = self._dispatcher.operator
        self._judge.finish()
        if operator.wish == "pause":
            self._store.set_status(self._context.run, "paused")
        while operator.wish == "pause":
            self._dispatcher.pump(math.inf)
        if operator.wish == "go":
            self._store.set_status(self._context.run, "running")

    # The end.

    def _end(
        self, status: str, error: str | None = None, exit_code: int = 0, early: str | None = None
    ) -> control.RunFinished:
        """Commit and report the end of the run."""
        self._services.record_traffic(self._context.run)
        self._settle_late_tasks()
        reason = error or early
        self._store.end_run(self._context.run, status, reason)
        finished = self._finished(status, error, exit_code).model_copy(update={"early": early})
        line = f"the run {status}: {reason}" if reason else f"the run {status}"
        self._reporter.emit(finished, line)
        self._store.flush()
        return finished

    def _settle_late_tasks(self) -> None:
        """Settle the tasks that a later round would have taken over."""
        last = self._store.last_round(self._context.run)
        if last is None or last.state not in FINAL:
            return
        late = training_tasks(self._context, self._store, last.number + 1)
        if not late:
            return
        ids = [task.id for task in late]
        self._store.settle(ids, TaskPhase.MISSED, "the run ended before the update was merged")
        self._dispatcher.close("the run is over")
        clean_up(self._context, self._services, last, late)

    def _interrupted(self, error: StorageError | OSError | BlobError) -> control.RunFinished:
        """Report that the disk or the broker fails; the run continues with the next server."""
        kind = TransportError if isinstance(error, ConnectionError) else StorageError
        detail = (
            f"{error}; the run has not ended: start it again to continue it (`shoal up` does so"
            " automatically)"
        )
        finished = self._finished("stopped", detail, kind.exit_code)
        self._reporter.emit(finished)  # without a log line, which could not be written
        return finished

    def _finished(self, status: str, error: str | None, exit_code: int) -> control.RunFinished:
        version = read_version(self._context, self._store)
        record = self._store.run(self._context.run)
        return control.RunFinished.model_validate(
            {
                **self._reporter.stamp,
                "status": status,
                "version": version.number,
                "rounds": queries.count_closed_rounds(self._store.versions(self._context.run)),
                "evaluation": version.evaluation,
                "wire_bytes": record.wire_bytes if record is not None else 0,
                "payload_bytes": record.payload_bytes if record is not None else 0,
                "error": error,
                "exit_code": exit_code,
            }
        )

    def _clean_up_newest_round(self) -> None:
        """Clean up after the newest round if it is over: the last server may not have."""
        last = self._store.last_round(self._context.run)
        if last is None or last.state not in FINAL:
            return
        trained = training_tasks(self._context, self._store, last.number)
        statistics = self._store.tasks(last.run, last.number, "statistics")
        clean_up(self._context, self._services, last, [*trained, *statistics])
