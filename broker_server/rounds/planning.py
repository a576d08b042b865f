"""Plans a round: which device trains what, from one blob of weights for all that share a plan."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from broker_server.rounds.closing import ClosingRule, quorum_size
from broker_server.rounds.collecting import Collection, OpenTask
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
    rounding_loss: float  # the most that the download's encoding took from weights, of their norm


def task_id(run: str, number: int, kind: str, device: str) -> str:
    """Return the name of a device's task in a round: a function of the arguments, and unique."""
    digest = hashlib.sha256(f"{run}/{number}/{kind}/{device}".encode()).hexdigest()
    return f"{kind[0]}{number}-{digest[:20]}"


def plan_round(
    context: RunContext,
    chosen: Sequence[Assignment],
    version: VersionRecord,
    number: int,
    blobs: BlobStore,
) -> RoundPlan:
    """Plan a round: cut the weights that its devices are sent, and keep them.

    Args:
        context: the run.
        chosen: the devices of the round with their tiers, by id.
        version: the global version that the round starts from.
        number: of the round.
        blobs: where weights are kept.

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
        for tier in context.strategy.offer(assignment.tier.tier):
            choices.append(cutting.choice(device, tier))
        # The first choice is the default; where a device may choose its tier, the others follow.
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
    losses = [weights.rounding_loss for weights in cutting.by_plan.values()]
    return RoundPlan(record, tasks, max(losses, default=0.0))


@dataclass(frozen=True)
class _Cutting:
    """Cuts the weights of a round, once for all devices that share a plan."""

    context: RunContext
    version: VersionRecord
    model: GlobalModel
    blobs: BlobStore
    by_plan: dict[str, SentWeights]  # by the key of the plan, filled as plans are met

    def choice(self, device: str, tier: Tier) -> Alternative:
        """Return what a device may take, and cut its weights if no other device has the plan."""
        seed = self.context.config.seed
        request = PlanRequest(tier, device, self.version.number, seed)
        planned = self.context.strategy.plan(request)
        if planned.key not in self.by_plan:
            self.by_plan[planned.key] = cut_weights(
                self.context, request, planned.plan, self.model, self.blobs
            )
        artifact_set = self.context.set_of(device, self.context.artifacts.tiers[tier.id])
        weights = self.by_plan[planned.key].ref
        return alternative(tier.id, artifact_set, weights, planned.key)


def compiled_plans(
    context: RunContext, tasks: Sequence[TaskRecord]
) -> dict[tuple[int, str], CompiledPlan]:
    """Return the plans of all choices of a round's tasks, by version and plan key.

    They are made again from what the store knows, and are the same as those that were sent.
    """
    plans: dict[tuple[int, str], CompiledPlan] = {}
    for task in tasks:
        for choice in task.choices:
            key = (task.version, choice.plan_key)
            if key not in plans:
                tier = Tier.parse(choice.tier)
                request = PlanRequest(tier, task.device, task.version, context.config.seed)
                plan = context.strategy.plan(request).plan
                plans[key] = compile_plan(context.artifacts.layout, plan)
    return plans


def require_tiers(context: RunContext, store: Store) -> None:
    """Check that every tier that devices are training is still exported.

    Raises:
        ConfigError: one is not.
    """
    last = store.last_round(context.run)
    if last is None:
        return
    number = last.number + 1 if last.state in FINAL else last.number
    training: set[str] = set()
    for task in training_tasks(context, store, number):
        training.add(task.tier)
        training.update(choice.tier for choice in task.choices)
    missing = training - context.artifacts.tiers.keys()
    if missing:
        tiers = ", ".join(sorted(missing))
        raise ConfigError(
            f"{tiers} of {context.artifacts.arch}, which devices are training, is not in"
            f" {context.config.model.artifacts} any more: export it again and say `shoal resume`,"
            " or end the run with `shoal stop`"
        )


def statistics_tasks(
    context: RunContext,
    devices: Sequence[str],
    version: VersionRecord,
    number: int,
    weights: BlobRef,
) -> list[TaskRecord]:
    """Return tasks that ask devices for the batch norm statistics of a version.

    Args:
        context: the run.
        devices: by id.
        version: the version.
        number: of the round that made it.
        weights: what is judged of it.
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


def open_collection(
    context: RunContext, tasks: Sequence[TaskRecord], rule: ClosingRule
) -> Collection:
    """Put stored tasks into a collection.

    Args:
        context: the run.
        tasks: of one kind, at least one, by device. Those of earlier rounds keep their versions.
        rule: when the collection closes.
    """
    kind = tasks[0].kind
    instructions: dict[int, Instructions] = {}
    open_tasks = {}
    for task in tasks:
        if task.version not in instructions:
            instructions[task.version] = context.method.instructions(kind, task.version)
        open_tasks[task.id] = _open_task(context, task, instructions[task.version])
    # Tasks that are taken over from earlier rounds have the numbers of these.
    number = max(task.round for task in tasks)
    return Collection(number=number, kind=kind, tasks=open_tasks, rule=rule)


def _open_task(context: RunContext, task: TaskRecord, instructions: Instructions) -> OpenTask:
    tiers = context.artifacts.tiers
    contract = {"contract": context.contracts.get(task.tier)}
    manifests = {choice.tier: tiers[choice.tier].manifest for choice in task.choices}
    return OpenTask(
        task,
        tiers[task.tier].manifest,
        manifests=manifests,
        instructions=instructions.model_copy(update=contract),
    )
