"""The evaluators of a run: the eval graphs of the evaluated tiers, opened with their test sets."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from broker_server.rounds.artifacts import TierArtifacts
from broker_server.rounds.contracts import FleetContracts
from broker_server.rounds.evaluation import Evaluator
from broker_server.rounds.norm_statistics import has_statistics
from broker_server.rounds.onnx_runtime import GraphStopper
from broker_server.rounds.run_context import RunContext
from fleet_protocol.data.terms import ContractTerms, DataContract
from fleet_protocol.errors import ConfigError, DataError


@dataclass(frozen=True)
class Evaluators:
    """The evaluators of one run, and the data contracts that come from their test sets.

    Attributes:
        judged: evaluator of the tier whose metric counts; None if versions are not evaluated.
        beside: evaluations of the further tiers, in the order of the configuration.
        apart: evaluate all but the last version while the next round runs. A simulation does not:
            its workers use all cores, and its rows contain the evaluations.
        contracts: contracts of the boards' data, by tier.
        terms: the part of the contract that a resumed run keeps.
        unreadable: why no version of a resumed run is evaluated although it has a test set; empty
            if the test set can be read, or there is none.
        findings: what looks wrong in the test sets, in sentences.
    """

    judged: Evaluator | None = None
    beside: tuple[Evaluator, ...] = ()
    apart: bool = False
    contracts: Mapping[str, DataContract] = field(default_factory=dict)
    terms: ContractTerms | None = None
    unreadable: str = ""
    findings: tuple[str, ...] = ()


def open_evaluators(context: RunContext) -> Evaluators:
    """Read the test sets, and open the graphs that evaluate the versions of a run.

    Raises:
        ConfigError: a tier is not exported; or several tiers are evaluated, and the batch norm
            statistics come from the devices, which return those of one tier only.
        DataError: a test set cannot be read, or does not fit its tier.
    """
    config = context.config.evaluation
    contracts = FleetContracts(context)
    if config.data is None:
        return Evaluators(contracts=contracts.by_tier(), terms=context.config.contract)
    further = []
    for tier in context.judged_beside:
        if tier is not context.judged:
            further.append(tier)
    if config.statistics == "query":
        _require_no_statistics(further)
    # One for all graphs, so that the end of a run stops whichever of them is running.
    halt = GraphStopper()
    # The test set of the metric's tier is read first: those of the further tiers must agree with
    # it.
    judged = _open_evaluator(context, contracts, context.judged, halt)
    by_tier = {}
    for tier in further:
        by_tier[tier.tier.id] = _open_evaluator(context, contracts, tier, halt)
    beside = []
    for tier in context.judged_beside:
        beside.append(by_tier.get(tier.tier.id, judged))
    return Evaluators(
        judged,
        tuple(beside),
        apart=not config.awaited,
        contracts=contracts.by_tier(),
        terms=contracts.settled(),
        findings=contracts.findings,
    )


def open_test_sets(context: RunContext) -> tuple[RunContext, Evaluators]:
    """Return the run with the contract from its test sets, and its evaluators.

    The store keeps the contract.

    Raises:
        ConfigError: as `open_evaluators`.
        DataError: as `open_evaluators`.
    """
    evaluators = open_evaluators(context)
    config = context.config.model_copy(update={"contract": evaluators.terms})
    method = replace(context.method, config=config)
    return replace(context, method=method, contracts=evaluators.contracts), evaluators


def reopen_test_sets(context: RunContext) -> tuple[RunContext, Evaluators]:
    """Return the same for a resumed run, which can continue without its test set.

    If a test set can no longer be read, the run keeps the names with which it began, and is not
    evaluated. A new run needs its test set: the contract of its boards comes from it.

    Raises:
        ConfigError: as `open_evaluators`.
    """
    try:
        return open_test_sets(context)
    except DataError as error:
        contracts = FleetContracts(context).by_tier()
        terms = context.config.contract
        unjudged = Evaluators(contracts=contracts, terms=terms, unreadable=str(error))
        return replace(context, contracts=contracts), unjudged


def _open_evaluator(
    context: RunContext, contracts: FleetContracts, tier: TierArtifacts, halt: GraphStopper
) -> Evaluator:
    config = context.config.evaluation
    return Evaluator(
        tier,
        contracts.test_set(tier),
        batch_size=config.batch_size,
        threads=config.threads,
        halt=halt,
    )


def _require_no_statistics(further: list[TierArtifacts]) -> None:
    if any(has_statistics(tier) for tier in further):
        names = ", ".join(tier.tier.id for tier in further)
        raise ConfigError(
            "evaluation.tiers: devices return the batch norm statistics of only one tier; "
            f'to evaluate {names} as well set evaluation.statistics = "server-batch"'
        )
