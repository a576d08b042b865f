"""What is fixed for a run: its name, configuration, artifacts, tiers and strategy, all checked."""

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from broker_server.rounds.artifacts import Artifacts, TierArtifacts
from broker_server.rounds.best import require_metric
from broker_server.rounds.run_checks import require_inputs, require_recipe, require_warmup
from broker_server.rounds.tier_assignment import require_levels, usable_tiers
from broker_server.settings.combinations import (
    features_of,
    keeps,
    method_settings,
    require_together,
)
from broker_server.settings.fleet import FleetConfig
from broker_server.settings.method_features import Method, method_features
from broker_server.settings.traits import Trait
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

# Fields of a manifest that say what the numbers of an update mean.
_MEANING = (
    "arch",
    "settings",
    "tier",
    "width",
    "depth",
    "classes",
    "input_shape",
    "input_dtype",
    "label_shape",
    "parameters",
    "statistics",
    "base",
)


def new_run_id() -> str:
    """Return a name for a run: when it began, and a few random digits."""
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(2)


@dataclass(frozen=True)
class RunContext:
    """What is fixed for a whole run.

    Attributes:
        run: its id.
        config: with absolute paths.
        artifacts: all exported tiers of the model.
        tiers: in use, largest first.
        strategy: as configured, built for these tiers.
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

    @property
    def chunk_bytes(self) -> int:
        """Return the payload bytes of a chunk: as configured, or as many as the broker takes."""
        return self.artifacts.full.ref.chunk_bytes

    def keeps(self, trait: Trait) -> bool:
        """Return whether a trait holds of the run, as far as its settings decide it."""
        return keeps(self.config, trait)

    def set_of(self, device: str, tier_set: TierArtifacts) -> BlobRef:
        """Return the artifact set that a task of a device names for a tier."""
        tested = self.sets(device).get(tier_set.tier.id)
        if tested is None:
            return tier_set.ref
        manifest, ref = tested
        # A set whose updates would mean something else cannot take the place of the run's.
        return tier_set.ref if self.set_difference(tier_set, manifest) else ref

    def set_difference(self, tier_set: TierArtifacts, new: Manifest) -> str:
        """Return why another artifact set cannot take the place of a tier's in this run.

        It is empty if it can.
        """
        old = tier_set.manifest
        fields = list(_MEANING)
        if self.config.train.optimizer_state == "keep":
            fields.append("states")
        differing = []
        for name in fields:
            if getattr(old, name) != getattr(new, name):
                differing.append(name)
        if old.recipe.loss != new.recipe.loss:
            differing.append("recipe.loss")
        differing += [f"graph {name}" for name in old.graphs.keys() - new.graphs.keys()]
        return f"{', '.join(differing)} of {tier_set.tier.id} are others than" if differing else ""

    @property
    def open_labels(self) -> bool:
        """Return whether only `labels` in ``[data]`` of the boards say what a label means.

        Where a contract has names, boards go by these; where a part of the model stays on the
        boards, or tiers have heads of their own, labels may differ.
        """
        named = any(contract.labels for contract in self.contracts.values())
        own_heads = any(self.artifacts.layout.own_head(tier_set.tier) for tier_set in self.tiers)
        return not (named or own_heads or self.strategy.stays)

    @property
    def judged(self) -> TierArtifacts:
        """Return the tier that is evaluated.

        Raises:
            ConfigError: the configured tier, or the full one, is not exported.
        """
        tier = self.config.evaluation.tier
        return self.artifacts.full if tier is None else self._exported("evaluation.tier", tier)

    @property
    def judged_beside(self) -> tuple[TierArtifacts, ...]:
        """Return further tiers that are evaluated.

        Raises:
            ConfigError: one of them is not exported.
        """
        tiers = self.config.evaluation.tiers
        return tuple(self._exported("evaluation.tiers", tier) for tier in tiers)

    @property
    def moving(self) -> str | None:
        """Return a tier whose next slice may have other units than its last one.

        None if the plans of all tiers stay.
        """
        for tier_set in self.tiers:
            request = PlanRequest(tier_set.tier, "", 0, self.config.seed)
            plan = self.strategy.plan(request).plan
            if plan.kind != "static" or self.strategy.renews_units:
                return tier_set.tier.id
        return None

    def instructions(
        self, kind: Literal["train", "statistics"], closed_rounds: int
    ) -> Instructions:
        """Return what a task asks of a device.

        The strategy adds its part to training alone.

        Args:
            kind: of the task.
            closed_rounds: how many rounds are closed.
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

    def initial_record(self) -> RunRecord:
        """Return the run as the store has it when it begins, without the broker's login."""
        url = without_login(self.config.broker.url)
        broker = self.config.broker.model_copy(update={"url": url})
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

    def _exported(self, key: str, tier: str) -> TierArtifacts:
        exported = self.artifacts.tiers.get(tier)
        if exported is None:
            tiers = ", ".join(self.artifacts.tiers)
            raise ConfigError(f"{key}: {tier!r} is not exported; exported are {tiers}")
        if self.artifacts.layout.own_head(exported.tier) and exported not in self.tiers:
            raise ConfigError(
                f"{key}: {tier!r} has a head of its own, which this run does not train"
            )
        return exported


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
        [tier_set.tier for tier_set in allowed],
        config.server_optimizer,
    )
    tiers = _tiers_in_use(allowed, strategy)
    require_levels(tiers, config.tiers)
    context = RunContext(run, config, artifacts, tiers, strategy, noise)
    # What a method needs and breaks is known only when it is built and says what it asks for.
    asked = context.instructions("train", 0)
    require_together([*features_of(config), *method_features(config, _method_of(context, asked))])
    if config.privacy is not None:
        require_accountant()
    for tier_set in tiers:
        require_inputs(asked.train, tier_set.manifest)
        require_recipe(config.model.recipe, tier_set.manifest)
    if config.evaluation.data is not None:
        require_metric(config.evaluation, context.judged.manifest.recipe)
        _warn_of_untrained(context)
    return context


def _tiers_in_use(
    allowed: Sequence[TierArtifacts], strategy: Strategy
) -> tuple[TierArtifacts, ...]:
    """Return the allowed tiers that a strategy trains, in their order."""
    in_use = []
    for tier_set in allowed:
        if tier_set.tier in strategy.tiers:
            in_use.append(tier_set)
    return tuple(in_use)


def _method_of(context: RunContext, asked: Instructions) -> Method:
    config = context.config
    layout = context.artifacts.layout
    own_heads = []
    for tier_set in context.tiers:
        if layout.own_head(tier_set.tier):
            own_heads.append(tier_set.tier.id)
    judged = config.evaluation.data is not None
    queries = judged and config.evaluation.statistics == "query"
    return Method(
        strategy=context.strategy,
        asked=asked,
        moving=context.moving,
        shared_plans=_shared_plans(context),
        own_heads=tuple(own_heads),
        judged=judged,
        statistics=queries and bool(context.judged.manifest.statistics),
        pieces=config.train.micro_batch is not None,
        keeps_optimizer=asked.train.optimizer_state == "keep",
    )


def _shared_plans(context: RunContext) -> bool:
    """Return whether any two devices of a tier have the same plan."""
    for tier_set in context.tiers:
        # Any two ids will do: a method with a plan for each device derives it from the id.
        first = context.strategy.plan(PlanRequest(tier_set.tier, "one", 0, 0))
        second = context.strategy.plan(PlanRequest(tier_set.tier, "other", 0, 0))
        if first.key != second.key:
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
