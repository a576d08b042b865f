"""What is fixed for a run: its name, configuration, artifacts, tiers and strategy, found to go
together.
"""

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from broker_server.rounds.artifacts import Artifacts, TierArtifacts, load_artifacts
from broker_server.rounds.best import require_metric
from broker_server.rounds.run_checks import require_inputs, require_recipe, require_warmup
from broker_server.rounds.tier_assignment import require_levels, usable_tiers
from broker_server.settings.combinations import (
    Method,
    Trait,
    keeps,
    method_parts,
    method_settings,
    parts_of,
    require_together,
)
from broker_server.settings.fleet import FleetConfig
from broker_server.store.privacy_spent import require_accountant
from broker_server.store.records import RunRecord
from broker_server.strategies.registry import build_strategy
from broker_server.strategies.strategy import PlanRequest, Strategy
from fleet_protocol.data.terms import DataContract
from fleet_protocol.errors import ConfigError
from fleet_protocol.manifest import Manifest
from fleet_protocol.messages import BlobRef, Instructions, TrainSettings
from fleet_protocol.messages.instructions import Hiding, Ramp, Summing, Upload
from fleet_protocol.noise import Draw
from fleet_protocol.rounding import LEVELS
from fleet_protocol.spelling import without_login

_LOG = logging.getLogger(__name__)

# What says what the numbers of an update mean.
_SAME = (
    *(
        "arch",
        "settings",
        "tier",
        "width",
        "depth",
        "classes",
        "input_shape",
        "input_dtype",
        "label_shape",
    ),
    *("parameters", "statistics", "base"),
)


def load_others(config: FleetConfig, root: Path) -> Artifacts:
    """The artifacts of a folder, with which a run of this configuration can go on.

    Raises:
        ConfigError: it cannot, or nothing was exported there; the message says why.
        PlanError: the run asks for what these do not have.
    """
    arch = config.model.arch
    chunk_bytes = config.round.chunk_bytes
    model = config.model.model_copy(update={"artifacts": root})
    artifacts = load_artifacts(root, arch, chunk_bytes=chunk_bytes)
    new = prepare_run("", config.model_copy(update={"model": model}), artifacts)
    old = prepare_run(
        "",
        config,
        load_artifacts(config.model.artifacts, arch, chunk_bytes=chunk_bytes),
    )
    for item in old.tiers:
        other = new.artifacts.tiers.get(item.tier.id)
        if other is None:
            raise ConfigError(
                f"{root} has no tier {item.tier.id}, which the run in progress trains; export it, too"
            )
        why = old.why_other(item, other.manifest)
        if why:
            raise ConfigError(
                f"{other.folder}: {why} in the run in progress, whose updates would no longer add up; let it end, and"
                " begin another with these"
            )
    return artifacts


def new_run_id() -> str:
    """A name for a run: when it began, and a few random digits."""
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(2)


@dataclass(frozen=True)
class RunContext:
    """What is fixed for a whole run.

    Attributes:
        config: with absolute paths.
        tiers: in use, largest first.
        noise: random bytes for what a name says; those of the operating system, which nobody can
            draw again.
        contracts: the data contract of the devices of each tier, by tier.
        sets: by tier, artifact sets that a device has tested and trains instead of those of the
            run.
    """

    run: str
    config: FleetConfig
    artifacts: Artifacts
    tiers: tuple[TierArtifacts, ...]
    strategy: Strategy
    noise: Callable[[str], Draw] = lambda _name: os.urandom
    sets: Callable[[str], Mapping[str, tuple[Manifest, BlobRef]]] = lambda _device: {}
    contracts: Mapping[str, DataContract] = field(default_factory=dict)

    def keeps(self, trait: Trait) -> bool:
        """Return whether a trait holds of the run, as far as its settings decide it."""
        return keeps(self.config, trait)

    def set_of(self, device: str, item: TierArtifacts) -> BlobRef:
        """The artifact set that a task of a device names for a tier."""
        other = self.sets(device).get(item.tier.id)
        return item.ref if other is None or self.why_other(item, other[0]) else other[1]

    def why_other(self, item: TierArtifacts, new: Manifest) -> str:
        """Why another artifact set cannot take the place of a tier's in this run.

        Empty where it can.
        """
        old = item.manifest
        keeps = self.config.train.optimizer_state == "keep"
        fields = [*_SAME, *(["states"] if keeps else [])]
        other = [name for name in fields if getattr(old, name) != getattr(new, name)]
        other += ["recipe.loss"] if old.recipe.loss != new.recipe.loss else []
        other += [f"graph {key}" for key in old.graphs.keys() - new.graphs.keys()]
        return f"{', '.join(other)} of {item.tier.id} are others than" if other else ""

    @property
    def open_labels(self) -> bool:
        """Whether only `labels` in ``[data]`` of the boards say what a label means to the model.

        Where a contract has names, boards go by these; where a part of the model stays on the
        boards, or tiers have heads of their own, labels may differ.
        """
        named = any(contract.labels for contract in self.contracts.values())
        own_heads = any(self.artifacts.layout.own_head(item.tier) for item in self.tiers)
        return not (named or own_heads or self.strategy.stays)

    @property
    def judged(self) -> TierArtifacts:
        """The tier that is evaluated.

        A ConfigError where the configured one, or the full one, is not exported.
        """
        wanted = self.config.evaluation.tier
        return self.artifacts.full if wanted is None else self._exported("evaluation.tier", wanted)

    @property
    def judged_beside(self) -> tuple[TierArtifacts, ...]:
        """Further tiers that are evaluated; a ConfigError where one is not exported."""
        return tuple(
            self._exported("evaluation.tiers", wanted) for wanted in self.config.evaluation.tiers
        )

    @property
    def moving(self) -> str | None:
        """A tier whose next slice may have other units than its last one, None where all plans
        stay.
        """
        asked = {
            item.tier.id: PlanRequest(item.tier, "", 0, self.config.seed) for item in self.tiers
        }
        plans = {tier: self.strategy.plan(request).plan for tier, request in asked.items()}
        return next(
            (
                tier
                for tier, plan in plans.items()
                if plan.kind != "static" or self.strategy.renews_units
            ),
            None,
        )

    def instructions(
        self, kind: Literal["train", "statistics"], closed_rounds: int
    ) -> Instructions:
        """What a task asks of a device after some closed rounds.

        The strategy has a say in training alone.
        """
        settings = self._train_settings(kind, closed_rounds)
        if kind == "statistics":
            return Instructions(routine=kind, train=settings)
        asked = Instructions(train=settings, stays=self.strategy.stays, upload=self._upload())
        return self.strategy.instruct(asked, closed_rounds)

    def _train_settings(self, kind: str, closed_rounds: int) -> TrainSettings:
        train = self.config.train
        rounds = self.config.round.rounds
        rate = train.rate_after(closed_rounds)
        ramp = None
        # Nothing is left of a schedule after the last round, when statistics are asked for.
        schedule = train.rate if kind == "train" else None
        if schedule is not None and schedule.per == "step":
            ramp = Ramp(schedule=schedule, position=closed_rounds, rounds=rounds)
        elif schedule is not None:
            rate *= schedule.multiplier(closed_rounds, rounds)
        return TrainSettings(
            learning_rate=rate,
            epochs=train.epochs,
            steps=train.steps,
            batch_size=train.batch_size,
            micro_batch=train.micro_batch,
            seed=self.config.seed,
            mask_labels=train.mask_labels,
            optimizer_state=train.optimizer_state,
            ramp=ramp,
        )

    def _upload(self) -> Upload:
        """Return how devices send their updates."""
        encoding = self.config.upload.encoding
        # What rounding took belongs to other units where plans move.
        feedback = encoding not in LEVELS or self.moving is None
        return Upload(
            encoding=encoding,
            keep=self.config.upload.keep,
            feedback=feedback,
            hiding=self._hiding(),
            summing=self._summing(),
        )

    def _hiding(self) -> Hiding | None:
        noise = self.config.local_noise
        if noise is None:
            return None
        return Hiding(clip=noise.clip, deviation=noise.clip * noise.noise_multiplier)

    def _summing(self) -> Summing | None:
        secure = self.config.secure_sum
        if secure is None:
            return None
        # With central noise its bound holds for every device, not for their mean alone.
        noise = self.config.central_noise
        clip = secure.clip if noise is None else min(secure.clip, noise.clip)
        return Summing(clip=clip, least=secure.least)

    def begun(self) -> RunRecord:
        """The run as the store has it when it begins, without the broker's login."""
        broker = self.config.broker.model_copy(
            update={"url": without_login(self.config.broker.url)}
        )
        return RunRecord(
            id=self.run,
            fleet=self.config.fleet,
            arch=self.config.model.arch,
            config=self.config.model_copy(update={"broker": broker}).model_dump_json(),
            status="running",
            detail=None,
            created_at=time.time(),
            ended_at=None,
            wire_bytes=0,
            payload_bytes=0,
        )

    def _exported(self, key: str, wanted: str) -> TierArtifacts:
        if wanted not in self.artifacts.tiers:
            raise ConfigError(
                f"{key}: {wanted!r} is not exported; exported are {', '.join(self.artifacts.tiers)}"
            )
        found = self.artifacts.tiers[wanted]
        if self.artifacts.layout.own_head(found.tier) and found not in self.tiers:
            raise ConfigError(
                f"{key}: {wanted!r} has a head of its own, which this run does not train"
            )
        return found


def prepare_run(
    run: str,
    config: FleetConfig,
    artifacts: Artifacts,
    noise: Callable[[str], Draw] = lambda _name: os.urandom,
) -> RunContext:
    """Build what is fixed for a run, and refuse what does not go together before training starts.

    Raises:
        ConfigError: a name or number in the configuration is wrong.
        PlanError: method, model, tiers and settings do not go together.
    """
    require_warmup(config)
    allowed = usable_tiers(artifacts.tiers, config.tiers)
    strategy = build_strategy(
        method_settings(config),
        artifacts.layout,
        [item.tier for item in allowed],
        config.server_optimizer,
    )
    tiers = tuple(item for item in allowed if item.tier in strategy.tiers)
    require_levels(tiers, config.tiers)
    context = RunContext(run, config, artifacts, tiers, strategy, noise)
    asked = context.instructions("train", 0)
    require_together([*parts_of(config), *method_parts(config, _method_of(context, asked))])
    if config.privacy is not None:
        require_accountant()
    for item in tiers:
        require_inputs(asked.train, item.manifest)
        require_recipe(config.model.recipe, item.manifest)
    if config.evaluation.data is not None:
        require_metric(config.evaluation, context.judged.manifest.recipe)
        _warn_of_untrained(context)
    return context


def _method_of(context: RunContext, asked: Instructions) -> Method:
    config = context.config
    layout = context.artifacts.layout
    own_heads = tuple(item.tier.id for item in context.tiers if layout.own_head(item.tier))
    judged = config.evaluation.data is not None
    queries = judged and config.evaluation.statistics == "query"
    return Method(
        strategy=context.strategy,
        asked=asked,
        moving=context.moving,
        shared_plans=_shared_plans(context),
        own_heads=own_heads,
        judged=judged,
        statistics=queries and bool(context.judged.manifest.statistics),
        pieces=config.train.micro_batch is not None,
        keeps_optimizer=asked.train.optimizer_state == "keep",
    )


def _shared_plans(context: RunContext) -> bool:
    """Return whether any two devices of a tier have the same plan."""
    for item in context.tiers:
        requests = [PlanRequest(item.tier, device, 0, 0) for device in ("one", "other")]
        keys = {context.strategy.plan(request).key for request in requests}
        if len(keys) > 1:
            return False
    return True


def _warn_of_untrained(context: RunContext) -> None:
    """Warn if the whole model is judged, of which devices train a part alone."""
    whole = context.config.evaluation.tier is None
    if whole and context.judged not in context.tiers and context.moving is None:
        _LOG.warning(
            "what is judged is the whole model, %s, of which devices train no more than %s"
            " (tiers.allowed): set evaluation.tier to that",
            context.judged.tier.id,
            context.tiers[0].tier.id,
        )
