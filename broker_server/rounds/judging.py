"""Evaluates global versions: their loss and accuracy on the server's test sets, after each merge.

A model with static batch norms first needs the statistics of the new version
(`broker_server.rounds.norm_statistics`), from the devices or from the test set.

The test set needs no device: if nothing waits for the result, a thread evaluates it while the next
round trains. No round ends before the version of the previous round is evaluated, so at most one
evaluation is in progress.
"""

import contextlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

# a different class in Python 3.10
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from broker_server.rounds.dispatch import Services
from broker_server.rounds.evaluation import Evaluator
from broker_server.rounds.evaluators import Evaluators
from broker_server.rounds.norm_statistics import Statistics, batch_statistics, has_statistics
from broker_server.rounds.round_records import sent_digests
from broker_server.rounds.run_context import RunContext
from broker_server.rounds.statistics_query import StatisticsMissingError, StatisticsQuery
from broker_server.rounds.stopping import StopRequested
from broker_server.rounds.tier_models import model_of
from broker_server.store import RoundRecord, VersionRecord
from broker_server.store.machine import RoundState
from fleet_protocol import control
from fleet_protocol.control import VersionEvaluation
from fleet_protocol.errors import DataChangedError, DataError
from fleet_protocol.mapped_tensors import open_tensors
from fleet_protocol.messages import BlobRef, Evaluation
from fleet_protocol.weights import encode_weights
from models.slicing import Tensors

_POLL_SECONDS = 0.2  # between two checks whether the server must stop, during an evaluation

_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True)
class Judgement:
    """The evaluation of a version, or why it is missing although it was due.

    Attributes:
        evaluation: None if none was due, if it failed, and while it is in progress.
        note: why it failed.
        later: whether it is in progress.
    """

    evaluation: VersionEvaluation | None = None
    note: str | None = None
    later: bool = False

    @property
    def summary(self) -> str:
        """Describe the evaluation in a few words."""
        if self.evaluation:
            return self.evaluation.summary
        if self.note:
            return self.note
        return "its evaluation is in progress" if self.later else "not evaluated"


@dataclass(frozen=True)
class _Pending:
    """An evaluation in progress."""

    version: VersionRecord
    judgement: Future[Judgement]


class Judge:
    """Evaluates the global versions of one run."""

    def __init__(self, context: RunContext, services: Services, evaluators: Evaluators) -> None:
        self._context = context
        self._evaluator = evaluators.judged
        self._unreadable = evaluators.unreadable
        self._beside = evaluators.beside
        self._apart = evaluators.apart
        self._query = StatisticsQuery(context, services)
        self._thread = ThreadPoolExecutor(1, "judge")
        self._pending: _Pending | None = None
        self._dispatcher = services.dispatcher
        self._store = services.store
        self._blobs = services.blobs

    # Scheduling.

    def judge(self, record: RoundRecord, version: VersionRecord) -> Judgement:
        """Evaluate the version of a round if that is due, or begin to.

        Results that a killed server had stored are not computed again.

        Raises:
            StopRequested: the server must end.
        """
        self.finish()
        if not self._is_due(version):
            return Judgement()
        if self._evaluator is None:
            return Judgement(note=self._unreadable)
        if version.evaluation is not None:
            return Judgement(version.evaluation)
        judged = self._put_judged_weights(version)
        # The map stays readable when the file is removed.
        weights = open_tensors(self._blobs.path(judged.digest))
        try:
            statistics = self._statistics(self._evaluator, record, version, judged)
        except (DataChangedError, StatisticsMissingError) as error:
            return Judgement(note=str(error))
        if judged.digest not in self._digests_in_use(version):
            self._blobs.remove(judged.digest)  # it can be cut from the version again
        judgement = self._thread.submit(
            self._evaluate, self._evaluator, weights, statistics, version
        )
        if self._apart and not self._is_last(version):
            self._pending = _Pending(version, judgement)
            return Judgement(later=True)
        result = self._wait_for(judgement)
        if result.evaluation is not None:
            self._store.judge_version(version.run, version.number, evaluation=result.evaluation)
        return result

    def resume(self) -> None:
        """Evaluate the newest closed round again if a server was killed during its evaluation."""
        rounds = self._store.rounds(self._context.run)
        newest: RoundRecord | None = None
        for record in rounds:
            if record.state is RoundState.CLOSED:
                newest = record
        if newest is None:
            return
        version = self._store.version(newest.run, newest.version + 1)
        if version is None or version.round != newest.number:
            return
        if not (version.evaluation or newest.note):
            self.judge(newest, version)

    def record_if_done(self) -> None:
        """Record the evaluation in progress if it has finished."""
        if self._pending is not None and self._pending.judgement.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the evaluation in progress, if any; record and report it."""
        if self._pending is None:
            return
        pending = self._pending
        self._pending = None
        judgement = self._wait_for(pending.judgement)
        version = pending.version
        self._store.judge_closed(version, judgement.evaluation, judgement.note)
        reporter = self._dispatcher.reporter
        event = control.RoundJudged(
            **reporter.stamp,
            round=version.round,
            version=version.number,
            evaluation=judgement.evaluation,
            note=judgement.note,
        )
        # After the commit, so that whoever reads of it finds it in the store.
        reporter.emit(event, f"version {version.number}: {judgement.summary}")

    def close(self) -> None:
        """Stop the thread and the graph that it runs.

        The next server repeats evaluations that were not reported.
        """
        if self._evaluator is not None:
            self._evaluator.halt.stop()
        self._thread.shutdown()

    def _is_last(self, version: VersionRecord) -> bool:
        return version.number >= self._context.config.round.rounds

    def _is_due(self, version: VersionRecord) -> bool:
        every = self._context.config.evaluation.every
        # The last version is always evaluated: it is what a run ends with.
        return self._is_last(version) or version.number % every == 0

    def _wait_for(self, result: Future[_ResultT]) -> _ResultT:
        """Wait for the thread; raise StopRequested if the server must end meanwhile."""
        while True:
            with contextlib.suppress(FutureTimeoutError):
                return result.result(_POLL_SECONDS)
            if self._dispatcher.stopping:
                raise StopRequested

    # Evaluations. They only read, so that they may run in the thread during a round.

    def _evaluate(
        self,
        evaluator: Evaluator,
        weights: Tensors,
        statistics: Tensors,
        version: VersionRecord,
    ) -> Judgement:
        """Evaluate a version on the test set of the judged tier, and on those of further tiers."""
        beside: dict[str, Evaluation] = {}
        try:
            evaluation = evaluator.evaluate(weights, statistics)
            for further in self._beside:
                tier = further.judged.tier.id
                same = further is evaluator
                beside[tier] = evaluation if same else self._evaluate_beside(further, version)
        except DataError as error:
            return Judgement(note=str(error))
        return Judgement(VersionEvaluation(**evaluation.model_dump(), tiers=beside))

    def _evaluate_beside(self, evaluator: Evaluator, version: VersionRecord) -> Evaluation:
        """Evaluate a further tier, with batch norm statistics from the test set."""
        weights = model_of(self._context, evaluator.judged.tier, version, self._blobs)
        statistics: Statistics = {}
        if has_statistics(evaluator.judged):
            statistics = self._own_statistics(evaluator, weights)
        return evaluator.evaluate(weights, statistics)

    # Batch norm statistics.

    def _statistics(
        self, evaluator: Evaluator, record: RoundRecord, version: VersionRecord, judged: BlobRef
    ) -> Mapping[str, NDArray[np.float32]]:
        """Return the statistics for evaluating the version; none for a model without them.

        Those in the store are used if they belong to this version, or if new ones are not yet due.
        """
        if not has_statistics(self._context.judged):
            return {}
        digest = version.statistics_digest
        if digest is None and not self._are_new_statistics_due(version):
            digest = self._latest_statistics()
        if digest is None:
            statistics = self._new_statistics(evaluator, record, version, judged)
            digest = self._blobs.put(encode_weights(statistics))
        self._store.judge_version(version.run, version.number, statistics=digest)
        return open_tensors(self._blobs.path(digest))

    def _are_new_statistics_due(self, version: VersionRecord) -> bool:
        config = self._context.config.evaluation
        evaluations = version.number // config.every
        return self._is_last(version) or evaluations % config.statistics_every == 0

    def _latest_statistics(self) -> str | None:
        versions = self._store.versions(self._context.run)
        for version in reversed(versions):
            if version.statistics_digest is not None:
                return version.statistics_digest
        return None

    def _new_statistics(
        self, evaluator: Evaluator, record: RoundRecord, version: VersionRecord, judged: BlobRef
    ) -> Statistics:
        if self._context.config.evaluation.statistics == "query":
            return self._query.ask(record, version, judged)
        weights = open_tensors(self._blobs.path(judged.digest))
        return self._wait_for(self._thread.submit(self._own_statistics, evaluator, weights))

    def _own_statistics(
        self, evaluator: Evaluator, weights: Mapping[str, NDArray[Any]]
    ) -> Statistics:
        """Compute the statistics of a tier from its test set."""
        return batch_statistics(
            evaluator.judged,
            weights,
            evaluator.data,
            batch_size=self._context.config.train.batch_size,
            threads=self._context.config.evaluation.threads,
            halt=evaluator.halt,
        )

    # The evaluated weights.

    def _put_judged_weights(self, version: VersionRecord) -> BlobRef:
        """Return the blob to evaluate: the version, or the model of the configured tier."""
        layout = self._context.artifacts.layout
        tier = self._context.judged.tier
        digest = version.digest
        # The whole model lies in the store already, under the digest of its version.
        if tier != layout.tier(1.0):
            model = model_of(self._context, tier, version, self._blobs)
            weights = {spec.name: model[spec.name] for spec in layout.kept(tier)}
            digest = self._blobs.put(encode_weights(weights))
        size = self._blobs.path(digest).stat().st_size
        return BlobRef(digest=digest, size=size, chunk_bytes=self._context.chunk_bytes)

    def _digests_in_use(self, version: VersionRecord) -> set[str]:
        """Return the digests of the version, and of the weights that the newest round has sent.

        A cut of the version may be among those.
        """
        digests = {version.digest}
        last = self._store.last_round(version.run)
        if last is not None:
            digests |= sent_digests(self._store.tasks(version.run, last.number, "train"))
        return digests
