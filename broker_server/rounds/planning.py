"""Planning a round: who trains what, and one blob of weights for all devices that share a plan."""

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from broker_server.rounds.artifacts import TierArtifacts
from broker_server.rounds.closing import ClosingRule, quorum_size
from broker_server.rounds.collecting import Collection, OpenTask
from broker_server.rounds.fleet import Assignment
from broker_server.rounds.run_context import RunContext
from broker_server.rounds.tier_models import open_model
from broker_server.store import (
    Alternatives,
    RoundRecord,
    Store,
    TaskRecord,
    VersionRecord,
)
from broker_server.store.machine import FINAL, RoundState
from broker_server.store.task_records import alternative
from broker_server.strategies.strategy import GlobalModel, PlanRequest
from broker_server.updates.distance import measure
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.digests import matches
from fleet_protocol.encodings import encode_whole, open_weights
from fleet_protocol.errors import ConfigError
from fleet_protocol.messages import BlobRef
from fleet_protocol.weights import weights_parts
from models.plan import Plan, compile_plan
from models.slicing import CompiledPlan, Tensors
from models.tier import Tier


def task_id(run: str, number: int, kind: str, device: str) -> str:
    """The name of a device's part in a round: the same whenever it is asked for, unlike any other."""
    digest = hashlib.sha256(f"{run}/{number}/{kind}/{device}".encode()).hexdigest()
    return f"{kind[0]}{number}-{digest[:20]}"


def store_sent_weights(
    context: RunContext, weights: Tensors, blobs: BlobStore, *, durable: bool
) -> tuple[BlobRef, float]:
    """Keep weights as devices are sent them; returns also what rounding took, of their norm.

    Raises:
        RefusedError: they cannot be encoded.
    """
    encoding = context.config.download.encoding
    lost = 0.0
    parts = weights_parts(encode_whole(weights, encoding))
    digest = blobs.put(*parts, durable=durable)
    size = sum(map(len, parts))
    if encoding != "fp32":
        whole = math.sqrt(sum(float(np.vdot(tensor, tensor)) for tensor in weights.values()))
        lost = measure(open_weights(blobs.path(digest)), weights).norm / (whole or 1.0)
    return BlobRef(digest=digest, size=size, chunk_bytes=context.config.round.chunk_bytes), lost


def _cut(
    context: RunContext,
    request: PlanRequest,
    plan: Plan,
    model: GlobalModel,
    blobs: BlobStore,
) -> tuple[BlobRef, float]:
    """Keep what a device is sent of a model, synced only where tasks may outlive their version: see
    `restore_sent_weights`.
    """
    layout = context.artifacts.layout
    sent = context.strategy.send(compile_plan(layout, plan), request, model)
    weights = {name: sent[name] for name in layout.shapes(request.tier)}
    return store_sent_weights(
        context, weights, blobs, durable=context.config.round.buffer is not None
    )


def restore_sent_weights(
    context: RunContext,
    tasks: Sequence[TaskRecord],
    versions: Callable[[int], VersionRecord],
    blobs: BlobStore,
) -> None:
    """Make what an open round has sent, where a power cut took it from the disk.

    Errors as of `plan_round`.
    """
    sent = {choice.weights.digest: (task, choice) for task in tasks for choice in task.choices}
    for digest, (task, choice) in sent.items():
        version = versions(task.version)
        if digest != version.digest and not (
            blobs.has(digest) and matches(blobs.read_unchecked(digest), digest)
        ):
            blobs.remove(digest)
            request = PlanRequest(
                Tier.parse(choice.tier), task.device, task.version, context.config.seed
            )
            _cut(
                context,
                request,
                context.strategy.plan(request).plan,
                open_model(blobs, version),
                blobs,
            )


def plan_round(
    context: RunContext,
    chosen: Sequence[Assignment],
    version: VersionRecord,
    number: int,
    blobs: BlobStore,
) -> tuple[RoundRecord, list[TaskRecord], float]:
    """Cut the weights of a round and put them into the store's blobs.

    The records are still to be committed.

    The number is the most that rounding took from weights, of their norm.

    Raises:
        BlobError: the global version cannot be read.
        RefusedError: the weights cannot be encoded.
        StorageError: the disk is full.
    """
    model = open_model(blobs, version)
    strategy = context.strategy
    refs: dict[str, tuple[BlobRef, float]] = {}
    tasks = []
    for item in chosen:
        choices = []
        for tier in strategy.offer(item.tier.tier):
            request = PlanRequest(tier, item.device, version.number, context.config.seed)
            planned = strategy.plan(request)
            if planned.key not in refs:
                refs[planned.key] = _cut(context, request, planned.plan, model, blobs)
            artifact_set = context.set_of(item.device, context.artifacts.tiers[tier.id])
            choices.append(alternative(tier.id, artifact_set, refs[planned.key][0], planned.key))
        first, *others = choices
        tasks.append(
            TaskRecord(
                id=task_id(context.run, number, "train", item.device),
                run=context.run,
                round=number,
                device=item.device,
                kind="train",
                version=version.number,
                **dict(first),
                others=Alternatives(items=tuple(others)) if others else None,
            )
        )
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
    return record, tasks, max((lost for _, lost in refs.values()), default=0.0)


def compiled_plans(
    context: RunContext, tasks: Sequence[TaskRecord]
) -> dict[tuple[int, str], CompiledPlan]:
    """The plans of all that a round's tasks may take, by version and plan key, made again from what
    the store knows.
    """
    plans: dict[tuple[int, str], CompiledPlan] = {}
    for task in tasks:
        for choice in task.choices:
            key = (task.version, choice.plan_key)
            if key not in plans:
                request = PlanRequest(
                    Tier.parse(choice.tier),
                    task.device,
                    task.version,
                    context.config.seed,
                )
                plans[key] = compile_plan(
                    context.artifacts.layout, context.strategy.plan(request).plan
                )
    return plans


def training_tasks(context: RunContext, store: Store, number: int) -> list[TaskRecord]:
    """The training tasks that a round has to do with, by device: its own, and those it took over
    from earlier ones.
    """
    late = (
        store.late_tasks(context.run, number, waiting=True)
        if context.config.round.buffer is not None
        else []
    )
    return sorted(
        [*store.tasks(context.run, number, "train"), *late],
        key=lambda task: task.device,
    )


def require_tiers(context: RunContext, store: Store) -> None:
    """See that all that devices are training is still exported; a ConfigError where it is not."""
    last = store.last_round(context.run)
    tasks = (
        [] if last is None else training_tasks(context, store, last.number + (last.state in FINAL))
    )
    wanted = {
        tier for task in tasks for tier in (task.tier, *(choice.tier for choice in task.choices))
    }
    gone = wanted - context.artifacts.tiers.keys()
    if gone:
        what = f"{', '.join(sorted(gone))} of {context.artifacts.arch}, which devices are training, is not"
        where = f"in {context.config.model.artifacts} any more"
        raise ConfigError(
            f"{what} {where}: export it again and say `shoal resume`, or end the run with `shoal stop`"
        )


def statistics_tasks(
    context: RunContext,
    devices: Sequence[str],
    version: VersionRecord,
    number: int,
    weights: BlobRef,
) -> list[TaskRecord]:
    """Tasks that ask devices for batch norm statistics of what is judged of a version, by the round
    that made it.
    """
    judged = context.judged
    return [
        TaskRecord(
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
        for device in devices
    ]


def open_collection(
    context: RunContext, tasks: Sequence[TaskRecord], rule: ClosingRule
) -> Collection:
    """Put stored tasks of one kind, at least one, by device, into a collection."""
    manifests: Mapping[str, TierArtifacts] = context.artifacts.tiers
    kind = tasks[0].kind
    asked = {
        version: context.instructions(kind, version) for version in {task.version for task in tasks}
    }
    return Collection(
        number=max(task.round for task in tasks),
        kind=kind,
        tasks={
            task.id: OpenTask(
                task,
                manifests[task.tier].manifest,
                manifests={choice.tier: manifests[choice.tier].manifest for choice in task.choices},
                instructions=asked[task.version].model_copy(
                    update={"contract": context.contracts.get(task.tier)}
                ),
            )
            for task in tasks
        },
        rule=rule,
    )
