"""Plans a round: what each device trains, and one blob of weights for all that share a plan."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from broker_server.rounds.collecting import Collection, OpenTask
from broker_server.rounds.collection_end import ClosingRule, quorum_size
from broker_server.rounds.round_records import training_tasks
from broker_server.rounds.run_context import RunContext
from broker_server.rounds.sent_weights import SentWeights, cut_weights
from broker_server.rounds.tier_assignment import Assignment
from broker_server.rounds.tier_models import open_model
from broker_server.store import (
    Alternatives,
    RoundRecord,
    Store,
    TaskRecord,
    VersionRecord,
)
from broker_server.store.machine import FINAL, RoundState
from broker_server.store.task_records import Alternative, alternative
from broker_server.strategies.strategy import GlobalModel, PlanRequest
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.errors import ConfigError
from fleet_protocol.messages import BlobRef, Instructions
from models.plan import compile_plan
from models.slicing import CompiledPlan
from models.tier import Tier


@dataclass(frozen=True)
class RoundPlan:
    """A planned round, to be committed to the store."""

    record: RoundRecord
    tasks: list[TaskRecord]  # by device
    # the largest loss of weights in the download's encoding, relative to their norm
    rounding_loss: float


def task_id(run: str, number: int, kind: str, device: str) -> str:
    """Return the name of a device's task in a round: unique, and a function of the arguments."""
    digest = hashlib.sha256(f"{run}/{number}/{kind}/{device}".encode()).hexdigest()
    # The digest keeps the name short enough for a topic; kind and round make it readable.
    return f"{kind[0]}{number}-{digest[:20]}"


def plan_round(
    context: RunContext,
    chosen: Sequence[Assignment],
    version: VersionRecord,
    number: int,
    blobs: BlobStore,
) -> RoundPlan:
    """Plan a round: cut the weights that are sent to its devices, and store them.

    Args:
        context: the run.
        chosen: the devices of the round with their tiers, by id.
        version: the global version from which the round starts.
        number: number of the round.
        blobs: blobs that hold the weights.

    Raises:
        BlobError: the global version cannot be read.
        RefusedError: the weights cannot be encoded.
        StorageError: the disk is full.
    """
    cutting = _Cutting(context, version, open_model(blobs, version), blobs, {})
    tasks = []
    for assignment in chosen:
        device = assignment.device
        choices = []
        # More than one tier only if the method lets devices choose.
        for tier in context.strategy.offer(assignment.tier.tier):
            choices.append(cutting.choice(assignment, tier))
        # The first choice is the default; if a device may choose its tier, the others follow.
        task = TaskRecord(
            id=task_id(context.run, number, "train", device),
            run=context.run,
            round=number,
            device=device,
            kind="train",
            version=version.number,
            **dict(choices[0]),
            others=Alternatives(items=tuple(choices[1:])) if choices[1:] else None,
        )
        tasks.append(task)
    record = RoundRecord(
        run=context.run,
        number=number,
        state=RoundState.PLANNED,
        version=version.number,
        quorum=quorum_size(context.config.round.quorum, len(chosen)),
        reason=None,
        planned_at=time.time(),
        opened_at=None,
        ended_at=None,
        evaluation=None,
        note=None,
        wanted=len(chosen),
    )
    losses = [cut.weights.rounding_loss for cut in cutting.by_plan.values()]
    return RoundPlan(record, tasks, max(losses, default=0.0))


@dataclass(frozen=True)
class _CutPlan:
    """The weights of a plan, and the id of the tier that it trains."""

    tier: str
    weights: SentWeights


@dataclass(frozen=True)
class _Cutting:
    """Cuts the weights of a round, once for all devices that share a plan."""

    context: RunContext
    version: VersionRecord
    model: GlobalModel
    blobs: BlobStore
    by_plan: dict[str, _CutPlan]  # by the key of the plan, filled as plans occur

    def choice(self, assignment: Assignment, tier: Tier) -> Alternative:
        """Return what a device may train, and cut its weights if no other device has the plan."""
        device = assignment.device
        seed = self.context.config.seed
        request = PlanRequest(tier, device, self.version.number, seed)
        planned = self.context.strategy.plan(request)
        if planned.key not in self.by_plan:
            weights = cut_weights(self.context, request, planned.plan, self.model, self.blobs)
            # The plan decides at which place the tier trains.
            self.by_plan[planned.key] = _CutPlan(planned.plan.tier.id, weights)
        cut = self.by_plan[planned.key]
        # Boards of a rollout may get another set of the same tier.
        tier_set = self.context.artifacts.tiers[cut.tier]
        artifact_set = self.context.set_of(device, tier_set, assignment.memory)
        return alternative(cut.tier, artifact_set, cut.weights.ref, planned.key)


def compiled_plans(
    context: RunContext, tasks: Sequence[TaskRecord]
) -> dict[tuple[int, str], CompiledPlan]:
    """Return what updates of a round hold, for each choice of its tasks, by version and plan key.

    Parameters that a tier does not train, or that stay on the devices, are in no update, so nothing
    after this asks for them.

    They are made again from the store, and equal those that were sent.
    """
    plans: dict[tuple[int, str], CompiledPlan] = {}
    for task in tasks:
        for choice in task.choices:
            key = (task.version, choice.plan_key)
            if key not in plans:
                tier = Tier.parse(choice.tier)
                request = PlanRequest(tier, task.device, task.version, context.config.seed)
                # A plan is a function of the request, so it is not stored.
                plan = context.strategy.plan(request).plan
                held = compile_plan(context.artifacts.layout, plan)
                plans[key] = held.without({*plan.frozen, *context.strategy.stays})
    return plans


def require_tiers(context: RunContext, store: Store) -> None:
    """Check that every tier that devices are training is still exported.

    Raises:
        ConfigError: a tier is not.
    """
    last = store.last_round(context.run)
    if last is None:
        return
    # An ended round is followed by the next one, which may take over its tasks.
    number = last.number + 1 if last.state in FINAL else last.number
    training: set[str] = set()
    for task in training_tasks(context, store, number):
        training.add(task.tier)
        training.update(choice.tier for choice in task.choices)
    missing = training - context.artifacts.tiers.keys()
    if missing:
        tiers = ", ".join(sorted(missing))
        raise ConfigError(
            f"{tiers} of {context.artifacts.arch}, which devices are training, is no longer "
            f"in {context.config.model.artifacts}: export it again and run `shoal resume`, "
            "or end the run with `shoal stop`"
        )


def statistics_tasks(
    context: RunContext,
    devices: Sequence[str],
    version: VersionRecord,
    number: int,
    weights: BlobRef,
) -> list[TaskRecord]:
    """Return tasks that request the batch norm statistics of a version from devices.

    Args:
        context: the run.
        devices: the devices by id.
        version: the version.
        number: number of the round that made it.
        weights: the weights that are evaluated.
    """
    judged = context.judged
    tasks = []
    for device in devices:
        task = TaskRecord(
            id=task_id(context.run, number, "statistics", device),
            run=context.run,
            round=number,
            device=device,
            kind="statistics",
            tier=judged.tier.id,
            plan_key=judged.tier.id,
            version=version.number,
            artifact_set=context.set_of(device, judged),
            weights=weights,
        )
        tasks.append(task)
    return tasks


def reported_efficiencies(context: RunContext, store: Store, before: int) -> Sequence[float]:
    """Return the system efficiencies of the first round in which devices have reported some.

    They stay the same for the rest of the run, so that what follows from them does, too.

    Args:
        context: the run.
        store: has the tasks.
        before: number of the round that is planned.

    Returns:
        None of them if the strategy does not need them, or no round before has any.
    """
    # Only such a strategy reads them, and reading costs a query for each round.
    if context.method.strategy.adapt is None:
        return ()
    for number in range(1, before):
        efficiencies = []
        for task in store.tasks(context.run, number, "train"):
            if task.metrics is not None and task.metrics.efficiency is not None:
                efficiencies.append(task.metrics.efficiency)
        if efficiencies:
            return efficiencies
    return ()


def open_collection(
    context: RunContext,
    tasks: Sequence[TaskRecord],
    rule: ClosingRule,
    efficiencies: Sequence[float] = (),
) -> Collection:
    """Put stored tasks into a collection.

    Args:
        context: the run.
        tasks: tasks of one kind, at least one, by device. Those of earlier rounds keep their
            versions.
        rule: when the collection closes.
        efficiencies: the result of `reported_efficiencies`.
    """
    kind = tasks[0].kind
    instructions: dict[int, Instructions] = {}
    # All tasks of a version share one value, which keeps a large round small.
    open_tasks = {}
    for task in tasks:
        if task.version not in instructions:
            instructions[task.version] = context.method.instructions(
                kind, task.version, efficiencies
            )
        open_tasks[task.id] = _open_task(context, task, instructions[task.version])
    # Tasks that are taken over from earlier rounds keep the numbers of those rounds.
    number = max(task.round for task in tasks)
    return Collection(number=number, kind=kind, tasks=open_tasks, rule=rule)


def _open_task(context: RunContext, task: TaskRecord, instructions: Instructions) -> OpenTask:
    tiers = context.artifacts.tiers
    # The contract names labels and columns of the tier that is offered first.
    contract = {"contract": context.contracts.get(task.tier)}
    manifests = {choice.tier: tiers[choice.tier].manifest for choice in task.choices}
    return OpenTask(
        task,
        tiers[task.tier].manifest,
        manifests=manifests,
        instructions=instructions.model_copy(update=contract),
    )
