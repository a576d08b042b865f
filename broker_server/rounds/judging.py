"""After a merge: batch norm statistics of the new version, and its accuracy on the server's test
set.

Statistics are those of HeteroFL (Diao et al., ICLR 2021), section 3; specification 1.6 and vector
H8: for each norm a device tells the mean over its batches of the batch mean and of the unbiased
batch variance.

Devices do one task at a time, so they are asked for statistics before the next round. The test set
needs no device: where nothing waits for what is found, a thread goes through it while the next
round trains. No round ends before the one before it is judged, so at most one judgement is under
way.
"""

import contextlib
import math
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import (
    TimeoutError as FutureTimeoutError,
)  # differs from the built-in one in Python 3.10
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from broker_server.rounds.artifacts import TierArtifacts
from broker_server.rounds.closing import ClosingRule
from broker_server.rounds.collecting import Collection
from broker_server.rounds.contracts import FleetContracts
from broker_server.rounds.dispatch import Services, gather
from broker_server.rounds.evaluation import Evaluator
from broker_server.rounds.onnx_runtime import Halt, open_graph, run_graph
from broker_server.rounds.planning import (
    open_collection,
    statistics_tasks,
    store_sent_weights,
    training_tasks,
)
from broker_server.rounds.run_context import RunContext
from broker_server.rounds.stopping import StopRequested
from broker_server.rounds.tier_models import model_of
from broker_server.store import RoundRecord, TaskPhase, VersionRecord
from broker_server.store.machine import RoundEvent, RoundState
from broker_server.updates.quarantine import quarantined
from fleet_protocol import control
from fleet_protocol.control import VersionEvaluation
from fleet_protocol.data import DataSet
from fleet_protocol.data.contract import ContractTerms, DataContract
from fleet_protocol.errors import ConfigError, DataChangedError, DataError
from fleet_protocol.manifest import parameter_input, statistic_mean, statistic_variance
from fleet_protocol.mapped_tensors import open_tensors
from fleet_protocol.messages import BlobRef, Evaluation
from fleet_protocol.weights import encode_weights
from models.slicing import Tensors

Statistics = dict[str, NDArray[np.float32]]
"""``stat.<norm>.mean`` and ``stat.<norm>.var`` to vectors of the norm's channels."""

_LOOK_SECONDS = (
    0.2  # between two checks whether the server should stop, while it waits for a judgement
)
_FoundT = TypeVar("_FoundT")


def has_statistics(full: TierArtifacts) -> bool:
    """Whether a model has static batch norms at all."""
    return bool(full.manifest.statistics)


def combine_statistics(
    answers: Sequence[tuple[int, Mapping[str, NDArray[Any]]]],
    norms: Sequence[str],
    rule: Literal["pooled", "per_client"],
) -> Statistics:
    """Make the devices' statistics into those of the fleet.

    With n_k batches on device k and N their sum, the mean is ``sum(n_k mean_k) / N``. The variance
    ``per_client`` is ``sum(n_k var_k) / N``: batches of one device lack what separates the devices
    (vector H8). ``pooled`` adds the variance between the devices' means, ``sum(n_k mean_k^2) / N -
    mean^2``, and so stands for the authors' one pooled and shuffled loader.

    Returns:
        float32 vectors; computed in float64.
    """
    total = float(sum(batches for batches, _ in answers))
    combined: Statistics = {}
    for norm in norms:
        mean_name = statistic_mean(norm)
        variance_name = statistic_variance(norm)
        means = [
            (batches / total, np.asarray(tensors[mean_name], np.float64))
            for batches, tensors in answers
        ]
        mean = sum((share * value for share, value in means), np.zeros_like(means[0][1]))
        variance = np.zeros_like(mean)
        for batches, tensors in answers:
            variance += batches / total * np.asarray(tensors[variance_name], np.float64)
        if rule == "pooled":
            variance += sum(
                (share * (value - mean) ** 2 for share, value in means),
                np.zeros_like(mean),
            )
        combined[mean_name] = mean.astype(np.float32)
        combined[variance_name] = variance.astype(np.float32)
    return combined


def batch_statistics(
    full: TierArtifacts,
    weights: Mapping[str, NDArray[Any]],
    data: DataSet,
    *,
    batch_size: int,
    threads: int,
    halt: Halt | None = None,
) -> Statistics:
    """Run the stats graph over the server's own samples: the mean over batches, each batch alike
    (vector H8).

    A last batch of one sample is dropped: its variance is not defined.

    Raises:
        ConfigError: the set has no stats graph.
        DataError: there is no batch of two samples, or the graph does not run on them.
    """
    graph = full.manifest.graphs.get("onnx/stats")
    if graph is None:
        raise ConfigError(f"{full.folder} has no stats graph; export the architecture again")
    session = open_graph(full.path(graph), threads=threads, halt=halt)
    names = [spec.name for spec in graph.outputs]
    inputs = {parameter_input(name): value for name, value in {**full.base(), **weights}.items()}
    sums: dict[str, NDArray[np.float64]] = {}
    count = 0
    for x, _ in data.batches(batch_size, full.manifest.input_dtype):
        if len(x) < 2:
            continue
        count += 1
        for name, value in zip(
            names,
            run_graph(session, names, {**inputs, "x": x}, data.source),
            strict=True,
        ):
            sums[name] = sums[name] + value if name in sums else np.asarray(value, np.float64)
    data.check_kept()
    if not count:
        raise DataError("the test set has no batch of two samples, so batch norm has no statistics")
    return {name: (value / count).astype(np.float32) for name, value in sums.items()}


@dataclass(frozen=True)
class Evaluators:
    """The eval graphs of the judged tier, if there is one, and of those `beside` it, with their
    test sets.
    """

    judged: Evaluator | None = None
    beside: tuple[Evaluator, ...] = ()
    # all but the last version are judged while the next round goes on. A simulation does without:
    # its workers have all cores, and its rows the judgements
    apart: bool = False
    contracts: Mapping[str, DataContract] = field(
        default_factory=dict
    )  # of the boards' data, by tier
    terms: ContractTerms | None = None  # the part that a resumed run keeps


def open_evaluators(context: RunContext) -> Evaluators:
    """Read the test sets and open the graphs that judge a run's versions.

    Raises:
        ConfigError: a tier is not exported; or several are judged of a model whose batch norm
            statistics are asked from the devices, who are asked for one tier.
        DataError: a test set cannot be read, or does not fit its tier.
    """
    config = context.config.evaluation
    halt = Halt()

    def opened(tier: TierArtifacts, test_set: DataSet) -> Evaluator:
        return Evaluator(
            tier,
            test_set,
            batch_size=config.batch_size,
            threads=config.threads,
            halt=halt,
        )

    contracts = FleetContracts(context)
    if config.data is None:
        return Evaluators(contracts=contracts.by_tier(), terms=context.config.contract)
    judged = context.judged
    beside = context.judged_beside
    others = [tier for tier in beside if tier is not judged]
    if config.statistics == "query" and any(map(has_statistics, others)):
        raise ConfigError(
            "evaluation.tiers: devices are asked for the batch norm statistics of one tier; to judge"
            f' {", ".join(item.tier.id for item in others)} as well set evaluation.statistics = "server-batch"'
        )
    own = opened(judged, contracts.test_set(judged))
    by_tier = {tier.tier.id: opened(tier, contracts.test_set(tier)) for tier in others}
    return Evaluators(
        own,
        tuple(by_tier.get(tier.tier.id, own) for tier in beside),
        apart=not config.awaited,
        contracts=contracts.by_tier(),
        terms=contracts.settled(),
    )


def open_test_sets(context: RunContext) -> tuple[RunContext, Evaluators]:
    """Return a run with the contract from its test sets, which it stores, and its evaluators.

    Raises the errors of `open_evaluators`.
    """
    evaluators = open_evaluators(context)
    kept = context.config.model_copy(update={"contract": evaluators.terms})
    return replace(context, config=kept, contracts=evaluators.contracts), evaluators


@dataclass(frozen=True)
class Judgement:
    """What was found about a version on the test set, if there is one, or why nothing was although
    it was due.
    """

    evaluation: VersionEvaluation | None = None
    note: str | None = None
    later: bool = False  # that is still being found

    @property
    def shown(self) -> str:
        """In a few words."""
        return (
            self.evaluation.summary
            if self.evaluation
            else self.note or ("is judged" if self.later else "not evaluated")
        )


class Judge:
    """Evaluates the global versions of one run."""

    def __init__(self, context: RunContext, services: Services, evaluators: Evaluators) -> None:
        self._context = context
        self._evaluator = evaluators.judged
        self._beside = evaluators.beside
        self._apart = evaluators.apart
        self._thread = ThreadPoolExecutor(1, "judge")
        self._under_way: tuple[VersionRecord, Future[Judgement]] | None = None
        self._dispatcher = services.dispatcher
        self._store = services.store
        self._blobs = services.blobs
        self._updates = services.updates
        self._settled = self._dispatcher.now() + self._dispatcher.settling_seconds

    def judge(self, record: RoundRecord, version: VersionRecord) -> Judgement:
        """Evaluate a version if that is due, or begin to.

        What a killed server had found is not asked for again.

        That the server shall end is a StopRequested.
        """
        self.finish()
        rounds = self._context.config.round
        config = self._context.config.evaluation
        last = version.number >= rounds.rounds
        if self._evaluator is None or not (last or version.number % config.every == 0):
            return Judgement()
        if version.evaluation is not None:
            return Judgement(version.evaluation)
        judged = self._judged_blob(version)
        weights = open_tensors(self._blobs.path(judged.digest))
        statistics: Mapping[str, NDArray[np.float32]] = {}
        if has_statistics(self._context.judged):
            fresh = last or (version.number // config.every) % config.statistics_every == 0
            digest = version.statistics_digest or (None if fresh else self._latest_statistics())
            if digest is None:
                try:
                    asks = config.statistics == "query"
                    own = self._evaluator
                    found = (
                        self._query(record, version, judged)
                        if asks
                        else self._own_statistics(own, weights)
                    )
                except DataChangedError as error:
                    return Judgement(note=str(error))
                if isinstance(found, str):
                    return Judgement(note=found)
                digest = self._blobs.put(encode_weights(found))
            self._store.judge_version(version.run, version.number, statistics=digest)
            statistics = open_tensors(self._blobs.path(digest))
        if judged.digest not in self._in_use(version):
            self._blobs.remove(
                judged.digest
            )  # a cut of the version can be made again; whoever has it mapped keeps it
        if self._apart and not last:
            self._under_way = (
                version,
                self._thread.submit(self._found, self._evaluator, weights, statistics, version),
            )
            return Judgement(later=True)
        found_now = self._awaited(
            self._thread.submit(self._found, self._evaluator, weights, statistics, version)
        )
        if found_now.evaluation is not None:
            self._store.judge_version(version.run, version.number, evaluation=found_now.evaluation)
        return found_now

    def go_on(self) -> None:
        """Begin anew what a server was killed in: the judgement of the newest closed round."""
        closed = [
            item
            for item in self._store.rounds(self._context.run)
            if item.state is RoundState.CLOSED
        ]
        for record in closed[-1:]:
            version = self._store.version(record.run, record.version + 1)
            if (
                version is not None
                and version.round == record.number
                and not (version.evaluation or record.note)
            ):
                self.judge(record, version)

    def look(self) -> None:
        """Record the judgement that is under way if it has been made."""
        if self._under_way is not None and self._under_way[1].done():
            self.finish()

    def finish(self) -> None:
        """Wait for the judgement that is under way, if one is, record it, and tell of it."""
        if self._under_way is None:
            return
        (version, future), self._under_way = self._under_way, None
        found = self._awaited(future)
        reporter = self._dispatcher.reporter
        self._store.judge_closed(version, found.evaluation, found.note)
        about = reporter.stamp | {"round": version.round, "version": version.number}
        event = control.RoundJudged(**about, evaluation=found.evaluation, note=found.note)
        reporter.emit(event, f"version {version.number}: {found.shown}")

    def close(self) -> None:
        """End the thread and its running graph.

        The next server repeats judgements that were not reported.
        """
        if self._evaluator is not None:
            self._evaluator.halt.stop()
        self._thread.shutdown()

    def _awaited(self, future: Future[_FoundT]) -> _FoundT:
        """Wait for the thread; raise a StopRequested if the server should stop meanwhile."""
        while True:
            with contextlib.suppress(FutureTimeoutError):
                return future.result(_LOOK_SECONDS)
            if self._dispatcher.stopping:
                raise StopRequested

    def _found(
        self,
        evaluator: Evaluator,
        weights: Tensors,
        statistics: Tensors,
        version: VersionRecord,
    ) -> Judgement:
        """What the test sets say of a version; it only reads, so that it may run beside a round."""
        try:
            own = evaluator.evaluate(weights, statistics)
            beside = {
                item.judged.tier.id: own if item is evaluator else self._judge_beside(item, version)
                for item in self._beside
            }
        except DataError as error:
            return Judgement(note=str(error))
        return Judgement(VersionEvaluation(**own.model_dump(), tiers=beside))

    def _in_use(self, version: VersionRecord) -> set[str]:
        """Weights of a version, and those that the newest round has sent, of which a cut of it may
        be one.
        """
        last = self._store.last_round(version.run)
        tasks = self._store.tasks(version.run, last.number, "train") if last is not None else []
        return {
            version.digest,
            *(choice.weights.digest for task in tasks for choice in task.choices),
        }

    def _judge_beside(self, evaluator: Evaluator, version: VersionRecord) -> Evaluation:
        """Loss and accuracy of a further tier.

        Its statistics come from the test set (see `open_evaluators`).
        """
        weights = model_of(self._context, evaluator.judged.tier, version, self._blobs)
        found = self._over_test_set(evaluator, weights) if has_statistics(evaluator.judged) else {}
        return evaluator.evaluate(weights, found)

    def _own_statistics(self, evaluator: Evaluator, weights: Tensors) -> Statistics:
        """Compute statistics of the judged tier from the server's own samples.

        May raise a StopRequested.
        """
        return self._awaited(self._thread.submit(self._over_test_set, evaluator, weights))

    def _over_test_set(self, evaluator: Evaluator, weights: Tensors) -> Statistics:
        size = self._context.config.train.batch_size
        threads = self._context.config.evaluation.threads
        return batch_statistics(
            evaluator.judged,
            weights,
            evaluator.data,
            batch_size=size,
            threads=threads,
            halt=evaluator.halt,
        )

    def _judged_blob(self, version: VersionRecord) -> BlobRef:
        """What is judged of a version: all of it, or the model of the configured tier."""
        layout = self._context.artifacts.layout
        tier = self._context.judged.tier
        digest = version.digest
        if tier != layout.tier(1.0):
            model = model_of(self._context, tier, version, self._blobs)
            digest = self._blobs.put(
                encode_weights({item.name: model[item.name] for item in layout.kept(tier)})
            )
        size = self._blobs.path(digest).stat().st_size
        return BlobRef(digest=digest, size=size, chunk_bytes=self._context.config.round.chunk_bytes)

    def _latest_statistics(self) -> str | None:
        known = [item.statistics_digest for item in self._store.versions(self._context.run)]
        return next((digest for digest in reversed(known) if digest is not None), None)

    def _query(
        self, record: RoundRecord, version: VersionRecord, judged: BlobRef
    ) -> Statistics | str:
        """Ask the devices; the reason, as text, if too few answer."""
        context = self._context
        config = self._context.config.evaluation
        if (
            context.config.download.encoding != "fp32"
        ):  # as a round sends them, so that a device has them then
            judged, _ = store_sent_weights(
                context,
                open_tensors(self._blobs.path(judged.digest)),
                self._blobs,
                durable=True,
            )
        tasks = self._store.tasks(record.run, record.number, "statistics")
        if not tasks:
            own = self._store.tasks(record.run, record.number, "train")
            late = training_tasks(context, self._store, record.number + 1)
            absent = {task.device for task in late if not task.phase.answered}
            absent |= {task.device for task in own if task.phase is TaskPhase.REFUSED}
            banned = quarantined(self._store, context.run, context.config.robust)
            absent |= {device for device, until in banned.items() if record.number <= until}
            trained = {task.device for task in own if task.phase is TaskPhase.MERGED}
            while (
                not trained <= {*self._dispatcher.fleet.online}
                and self._dispatcher.now() < self._settled
            ):
                self._dispatcher.pump(
                    self._settled
                )  # a server that starts has not heard of all who are there
            profiles = self._dispatcher.fleet.profiles()
            able = {
                device: item.examples > 1 and item.backends and not item.unable
                for device, item in profiles.items()
            }
            devices = [device for device, can in able.items() if can and device not in absent]
            if not devices:
                return "no device is online to give batch norm statistics"
            count = math.ceil(round(config.statistics_fraction * len(devices), 9))
            draw = random.Random(f"{context.config.seed}/statistics/{version.number}")  # noqa: S311  (reproducible)
            tasks = statistics_tasks(
                context,
                sorted(draw.sample(devices, count)),
                version,
                record.number,
                judged,
            )
            self._store.add_tasks(tasks)
        self._dispatcher.blobs.serve({judged.digest: self._blobs.path(judged.digest)})
        now = self._dispatcher.now()
        rule = ClosingRule(
            share=config.statistics_quorum,
            wanted=len(tasks),
            opened=now,
            deadline=now + context.config.round.deadline_seconds,
            grace=context.config.round.grace,
        )
        collection = open_collection(context, tasks, rule)
        reporter = self._dispatcher.reporter
        told = tuple(task.device for task in tasks)
        reporter.emit(
            control.StatisticsStarted(**reporter.stamp, round=record.number, devices=told)
        )
        return self._collect(collection)

    def _collect(self, collection: Collection) -> Statistics | str:
        self._dispatcher.open(collection)
        decision = gather(self._dispatcher, collection)
        self._dispatcher.close("the statistics query is over")
        self._store.settle([task.record.id for task in collection.unanswered], TaskPhase.MISSED)
        if decision.event is RoundEvent.GIVE_UP:
            return f"batch norm statistics: {decision.reason}"
        answers = [
            (record.metrics.batches, self._updates.tensors(record.update_digest))
            for record in (task.record for task in collection.tasks.values())
            if record.phase is TaskPhase.RECEIVED
            and record.metrics is not None
            and record.update_digest is not None
        ]
        norms = [spec.name for spec in self._context.judged.manifest.statistics]
        return combine_statistics(answers, norms, self._context.config.evaluation.combine)
