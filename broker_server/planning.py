"""Planning a round: who trains what, and one blob of weights for all devices that share a plan."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from broker_server.artifacts import Artifacts, TierArtifacts
from broker_server.collecting import Collection, OpenTask, quorum_of
from broker_server.config import FleetConfig
from broker_server.fleet import Assignment, require_levels, usable_tiers
from broker_server.machine import RoundState
from broker_server.store import Alternative, Alternatives, RoundRecord, TaskRecord, VersionRecord
from broker_server.strategies import PlanRequest, Strategy, strategy
from broker_server.tensors import open_state, open_tensors
from fleet_protocol.blob_store import BlobStore
from fleet_protocol.errors import ConfigError, PlanError
from fleet_protocol.manifest import Manifest
from fleet_protocol.messages import BlobRef, TrainSettings
from fleet_protocol.weights import encode_weights
from models.plan import CompiledPlan, compile_plan, make_plan
from models.slicing import Tensors
from models.tier import Tier

__all__ = [
    "RunContext",
    "compiled_plans",
    "judged_model",
    "model_of",
    "open_collection",
    "plan_round",
    "prepare_run",
    "statistics_tasks",
    "task_id",
    "tiers_in_use",
]


@dataclass(frozen=True)
class RunContext:
    """What is fixed for a whole run.

    Attributes:
        run: id.
        config: with absolute paths.
        artifacts: of the architecture.
        tiers: in use, largest first.
        strategy: how to plan and merge.
    """

    run: str
    config: FleetConfig
    artifacts: Artifacts
    tiers: tuple[TierArtifacts, ...]
    strategy: Strategy

    @property
    def judged(self) -> TierArtifacts:
        """The tier that is evaluated.

        Raises:
            ConfigError: the configured one, or the full one, is not exported.
        """
        wanted = self.config.evaluation.tier
        return self.artifacts.full if wanted is None else self._exported("evaluation.tier", wanted)

    @property
    def judged_beside(self) -> tuple[TierArtifacts, ...]:
        """Further tiers that are evaluated.

        Raises:
            ConfigError: one is not exported.
        """
        return tuple(self._exported("evaluation.tiers", wanted) for wanted in self.config.evaluation.tiers)

    def _exported(self, key: str, wanted: str) -> TierArtifacts:
        if wanted not in self.artifacts.tiers:
            raise ConfigError(f"{key}: {wanted!r} is not exported; exported are {', '.join(self.artifacts.tiers)}")
        found = self.artifacts.tiers[wanted]
        if self.artifacts.layout.own_head(found.tier) and found not in self.tiers:
            raise ConfigError(f"{key}: {wanted!r} has a head of its own, which this run does not train")
        return found


def tiers_in_use(artifacts: Artifacts, config: FleetConfig, strategy: Strategy) -> tuple[TierArtifacts, ...]:
    """The tiers that are exported, allowed by the configuration and usable by the strategy, largest first.

    Raises:
        ConfigError: the configuration names a tier that is not exported.
        PlanError: the strategy can use none of them.
    """
    allowed = usable_tiers(artifacts.tiers, config.tiers)
    usable = strategy.tiers(artifacts.layout, [item.tier for item in allowed])
    return tuple(item for item in allowed if item.tier in usable)


def prepare_run(run: str, config: FleetConfig, artifacts: Artifacts) -> RunContext:
    """Put together what is fixed for a run, and refuse what does not go together before anything is trained.

    Args:
        run: id.
        config: with absolute paths.
        artifacts: of the architecture.

    Raises:
        ConfigError: a name or number in the configuration is wrong.
        PlanError: method, model, tiers and settings do not go together.
    """
    optimizer = config.server_optimizer
    chosen = strategy(config.strategy, None if optimizer is None else optimizer.settings)
    tiers = tiers_in_use(artifacts, config, chosen)
    require_levels(tiers, config.tiers)
    prepared = chosen.for_run(chosen, artifacts.layout, [item.tier for item in tiers])
    own = [item.tier.id for item in tiers if artifacts.layout.own_head(item.tier)]
    if own and prepared.begin is None:
        raise PlanError(
            f"{', '.join(own)} of {artifacts.arch} have heads of their own, which {prepared.name} cannot merge; use"
            " inclusivefl, or export them without --head"
        )
    settings = _train_settings(config)
    changed = prepared.train(settings, artifacts.layout, 0)
    for item in tiers:
        _require_inputs(changed, item.manifest)
    stays = changed.mutual.stays if changed.mutual is not None else ()
    if stays and config.evaluation.data is not None:
        raise PlanError(
            f"{stays[0]} stays on the devices and is never trained here, so the global model has nothing to be judged"
            " by: remove evaluation.data, and look at the accuracy that the devices report (shoal rounds)"
        )
    return RunContext(run, config, artifacts, tiers, prepared)


def _require_inputs(settings: TrainSettings, manifest: Manifest) -> None:
    if settings.proximal_mu and not manifest.recipe.proximal:
        raise PlanError(
            f"{manifest.arch} {manifest.tier} was exported without a proximal term, so proximal_mu ="
            f" {settings.proximal_mu:g} would do nothing; export it with one"
        )


def _train_settings(config: FleetConfig, closed_rounds: int = 0) -> TrainSettings:
    train = config.train
    return TrainSettings(
        learning_rate=train.rate_after(closed_rounds),
        epochs=train.epochs,
        steps=train.steps,
        batch_size=train.batch_size,
        seed=config.seed,
        mask_labels=train.mask_labels,
    )


def task_id(run: str, number: int, kind: str, device: str) -> str:
    """The name of a device's part in a round: the same whenever it is asked for, unlike any other."""
    digest = hashlib.sha256(f"{run}/{number}/{kind}/{device}".encode()).hexdigest()
    return f"{kind[0]}{number}-{digest[:20]}"


def plan_round(
    context: RunContext, chosen: Sequence[Assignment], version: VersionRecord, number: int, blobs: BlobStore
) -> tuple[RoundRecord, list[TaskRecord]]:
    """Cut the weights of a round and put them into the store's blobs.

    Args:
        context: the run.
        chosen: devices with their tiers.
        version: the global version to cut.
        number: of the round.
        blobs: where the slices are kept; nothing else is written.

    Returns:
        The records to commit.

    Raises:
        BlobError: the global version cannot be read.
        StorageError: the disk is full.
    """
    layout = context.artifacts.layout
    weights = open_tensors(blobs.path(version.digest))
    state = open_state(blobs, version.state_digest)
    strategy, in_use = context.strategy, [item.tier for item in context.tiers]
    refs: dict[str, BlobRef] = {}
    tasks = []
    for item in chosen:
        choices = []
        for tier in strategy.offer(layout, in_use, item.tier.tier):
            request = PlanRequest(layout, tier, item.device, version.number, context.config.seed)
            planned = strategy.plan(request)
            if planned.key not in refs:
                sent = strategy.send(compile_plan(layout, planned.plan), request, weights, state)
                data = encode_weights({name: sent[name] for name in layout.shapes(tier)})
                refs[planned.key] = BlobRef(
                    digest=blobs.put(data), size=len(data), chunk_bytes=context.config.round.chunk_bytes
                )
            choices.append(
                Alternative(
                    tier=tier.id,
                    artifact_set=context.artifacts.tiers[tier.id].ref,
                    weights=refs[planned.key],
                    plan_key=planned.key,
                )
            )
        first, *others = choices
        tasks.append(
            TaskRecord(
                id=task_id(context.run, number, "train", item.device),
                run=context.run,
                round=number,
                device=item.device,
                kind="train",
                tier=first.tier,
                plan_key=first.plan_key,
                version=version.number,
                artifact_set=first.artifact_set,
                weights=first.weights,
                others=Alternatives(items=tuple(others)) if others else None,
            )
        )
    record = RoundRecord(
        run=context.run,
        number=number,
        state=RoundState.PLANNED,
        version=version.number,
        quorum=quorum_of(context.config.round.quorum, len(chosen)),
        reason=None,
        planned_at=time.time(),
        opened_at=None,
        ended_at=None,
        evaluation=None,
        note=None,
    )
    return record, tasks


def model_of(context: RunContext, tier: Tier, version: VersionRecord, blobs: BlobStore) -> Tensors:
    """What a tier is in a global version: the model that its devices are sent, with the leading units.

    Args:
        context: the run.
        tier: its shape; one that the run does not train is a cut of the global weights.
        version: the global version.
        blobs: where its weights and state are kept.

    Raises:
        BlobError: they cannot be read.
    """
    layout = context.artifacts.layout
    weights = open_tensors(blobs.path(version.digest))
    if tier == layout.tier(1.0):
        return weights
    plan = compile_plan(layout, make_plan(layout, tier))
    if all(item.tier != tier for item in context.tiers):
        return plan.slice(weights)
    request = PlanRequest(layout, tier, "", version.number, context.config.seed)
    return context.strategy.send(plan, request, weights, open_state(blobs, version.state_digest))


def judged_model(context: RunContext, version: VersionRecord, blobs: BlobStore) -> tuple[Tensors, Tensors]:
    """What judges a global version again: the weights of the judged tier, and the statistics of its norms.

    Args:
        context: the run.
        version: that was judged before, so that its statistics are known.
        blobs: where they lie.

    Raises:
        BlobError: they cannot be read.
    """
    statistics = open_tensors(blobs.path(version.statistics_digest)) if version.statistics_digest else {}
    return model_of(context, context.judged.tier, version, blobs), statistics


def compiled_plans(context: RunContext, tasks: Sequence[TaskRecord]) -> dict[str, CompiledPlan]:
    """The plans of a round's tasks, made again from what the store knows.

    Args:
        context: the run.
        tasks: of one round.

    Returns:
        By plan key, those that a device may still take included.
    """
    plans: dict[str, CompiledPlan] = {}
    for task in tasks:
        for choice in task.choices:
            if choice.plan_key not in plans:
                request = PlanRequest(
                    context.artifacts.layout, Tier.parse(choice.tier), task.device, task.version, context.config.seed
                )
                plans[choice.plan_key] = compile_plan(context.artifacts.layout, context.strategy.plan(request).plan)
    return plans


def statistics_tasks(
    context: RunContext, devices: Sequence[str], version: VersionRecord, number: int, weights: BlobRef
) -> list[TaskRecord]:
    """Tasks that ask devices for batch norm statistics of what is judged of a global version.

    Args:
        context: the run.
        devices: whom to ask, in order.
        version: the version.
        number: of the round that made it.
        weights: the judged tier's part of it.
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
            artifact_set=judged.ref,
            weights=weights,
        )
        for device in devices
    ]


def open_collection(
    context: RunContext,
    tasks: Sequence[TaskRecord],
    *,
    kind: Literal["train", "statistics"],
    quorum: int,
    closed_rounds: int,
    deadline: float,
) -> Collection:
    """Put stored tasks into a collection.

    Args:
        context: the run.
        tasks: of one round and kind, by device.
        kind: of the tasks.
        quorum: answers needed.
        closed_rounds: so far, for the learning rate schedule.
        deadline: ``time.monotonic()``.
    """
    manifests: Mapping[str, TierArtifacts] = context.artifacts.tiers
    settings = _train_settings(context.config, closed_rounds)
    if kind == "train":
        settings = context.strategy.train(settings, context.artifacts.layout, closed_rounds)
    return Collection(
        number=tasks[0].round,
        kind=kind,
        tasks={
            task.id: OpenTask(
                task,
                manifests[task.tier].manifest,
                manifests={choice.tier: manifests[choice.tier].manifest for choice in task.choices},
                stays=frozenset(settings.mutual.stays if settings.mutual is not None else ()),
            )
            for task in tasks
        },
        train=settings,
        quorum=quorum,
        deadline=deadline,
    )
