"""What is fixed for a run: its name, configuration, artifacts, tiers and strategy, found to go
together.
"""

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from broker_server.rounds.artifacts import Artifacts, TierArtifacts, load_artifacts
from broker_server.rounds.best import require_metric
from broker_server.rounds.tier_assignment import require_levels, usable_tiers
from broker_server.settings.fleet import FleetConfig
from broker_server.settings.pairs import require_pairs
from broker_server.store.privacy_spent import require_accountant
from broker_server.store.records import RunRecord
from broker_server.strategies.registry import build_strategy
from broker_server.strategies.strategy import Average, PlanRequest, Strategy
from fleet_protocol.data.terms import DataContract
from fleet_protocol.encodings import LEVELS
from fleet_protocol.errors import ConfigError, PlanError
from fleet_protocol.manifest import Manifest
from fleet_protocol.messages import BlobRef, Instructions, TrainSettings
from fleet_protocol.messages.instructions import Hiding, Ramp, Summing, Upload
from fleet_protocol.noise import Draw
from fleet_protocol.recipe import RecipeTable
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
        train = self.config.train
        rate = train.rate_after(closed_rounds)
        ramp = None
        rounds = self.config.round.rounds
        schedule = (
            train.rate if kind == "train" else None
        )  # nothing is left of a rate after the last round
        if schedule is not None and schedule.per == "step":
            ramp = Ramp(schedule=schedule, position=closed_rounds, rounds=rounds)
        elif schedule is not None:
            rate *= schedule.multiplier(closed_rounds, rounds)
        settings = TrainSettings(
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
        if kind == "statistics":
            return Instructions(routine=kind, train=settings)
        encoding = self.config.upload.encoding
        feedback = encoding not in LEVELS or self.moving is None
        privacy = self.config.privacy
        hiding = None
        if privacy is not None and privacy.where == "local":
            hiding = Hiding(clip=privacy.clip, deviation=privacy.clip * privacy.noise_multiplier)
        secure = self.config.secure_sum
        summing = None
        if (
            secure is not None
        ):  # with central noise its bound holds for every device, not for their mean alone
            clip = secure.clip if privacy is None else min(secure.clip, privacy.clip)
            summing = Summing(clip=clip, least=secure.least)
        upload = Upload(
            encoding=encoding,
            keep=self.config.upload.keep,
            feedback=feedback,
            hiding=hiding,
            summing=summing,
        )
        asked = Instructions(train=settings, stays=self.strategy.stays, upload=upload)
        return self.strategy.instruct(asked, closed_rounds)

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
    """Put together what is fixed for a run, and refuse what does not go together before anything is
    trained.

    Raises:
        ConfigError: a name or number in the configuration is wrong.
        PlanError: method, model, tiers and settings do not go together.
    """
    rate = config.train.rate
    rounds = config.round.rounds
    if rate is not None and rate.warmup > rounds:
        raise PlanError(
            f"train.rate.warmup: {rate.warmup:g} rounds of warm-up in a run of {rounds}, so that the learning rate"
            " never gets its size; take fewer, a part of one (0.5) too"
        )
    allowed = usable_tiers(artifacts.tiers, config.tiers)
    robust = config.robust
    average: Average = "mean" if robust.merge == "krum" else robust.merge
    require_pairs(config)
    settings = replace(config.strategy.settings, average=average, faulty=robust.faulty)
    if (
        config.privacy is not None or config.secure_sum is not None
    ):  # what the method would do by itself
        settings = replace(settings, label_rule=False, weighting=settings.weighting or "uniform")
    prepared = build_strategy(
        settings,
        artifacts.layout,
        [item.tier for item in allowed],
        config.server_optimizer,
    )
    tiers = tuple(item for item in allowed if item.tier in prepared.tiers)
    require_levels(tiers, config.tiers)
    own = [item.tier.id for item in tiers if artifacts.layout.own_head(item.tier)]
    if own and prepared.begin is None:
        raise PlanError(
            f"{', '.join(own)} of {artifacts.arch} have heads of their own, which {prepared.name} cannot merge; use"
            " inclusivefl, or export them without --head"
        )
    if robust.merge == "krum":
        _require_shared_plans(
            prepared,
            tiers,
            'robust.merge = "krum" compares',
            'take "trimmed_mean" or "median"',
        )
    context = RunContext(run, config, artifacts, tiers, prepared, noise)
    asked = context.instructions("train", 0)
    if config.round.buffer is not None:
        _require_deltas(
            prepared,
            asked,
            "round.buffer takes updates that were made from earlier versions",
            "buffer",
        )
    free = asked.model_copy(update={"chooser": None})  # who chooses a tier has no say in these two
    if config.upload.encoding == "topk":
        if not asked.upload.feedback:
            raise PlanError(
                f'upload.encoding = "topk" needs plans that stay, those of {prepared.name} move: what a round does not'
                ' send would belong to other units; take "int8", which needs no memory, or plan = "static"'
            )
        _require_deltas(
            prepared,
            free,
            "upload.encoding: what is not sent counts as not changed",
            "[upload]",
        )
    if config.download.encoding != "fp32":
        _require_deltas(
            prepared,
            free,
            "download.encoding: what rounding takes from weights is given back",
            "[download]",
        )
    if config.secure_sum is not None:
        _require_deltas(
            prepared,
            asked,
            "secure_sum: updates are added up before they are seen",
            "[secure_sum]",
        )
        _require_shared_plans(
            prepared, tiers, "secure_sum adds up", 'take heterofl with plan = "static"'
        )
    if config.privacy is not None:
        require_accountant()
    if config.privacy is not None or config.secure_sum is not None:
        _require_hidden(context, asked)
    if asked.train.micro_batch is not None and asked.routine != "train":
        raise PlanError(
            f"train.micro_batch: the routine {asked.routine} takes whole batches; leave it out"
        )
    for item in tiers:
        _require_inputs(asked.train, item.manifest)
        _require_recipe(config.model.recipe, item.manifest)
    moving = context.moving if asked.train.optimizer_state == "keep" else None
    if moving is not None:
        raise PlanError(
            f'train.optimizer_state = "keep" needs plans that stay, those of {prepared.name} for {moving} move: the'
            ' states would belong to other units; use "reset"'
        )
    if config.evaluation.data is not None:
        require_metric(config.evaluation, context.judged.manifest.recipe)
    if asked.stays and config.evaluation.data is not None:
        raise PlanError(
            f"{asked.stays[0]} stays on the devices and is never trained here, so the global model has nothing to be"
            " judged by: remove evaluation.data (in a simulation give [[own_models.models]] their labels), and look at"
            " the accuracy that the devices report (shoal rounds)"
        )
    whole = config.evaluation.data is not None and config.evaluation.tier is None
    if whole and context.judged not in tiers and context.moving is None:
        _LOG.warning(
            "what is judged is the whole model, %s, of which devices train no more than %s (tiers.allowed): set"
            " evaluation.tier to that",
            context.judged.tier.id,
            tiers[0].tier.id,
        )
    return context


def _require_deltas(strategy: Strategy, asked: Instructions, what: str, remove: str) -> None:
    """See that the global model moves by a mean of what devices have changed, in tiers that they
    were given.
    """
    why = ""
    if not strategy.merge.deltas:
        why = f"{strategy.name} does not average entry by entry what its devices have changed; take heterofl or fedavg"
    elif asked.chooser is not None:
        why = f"with {strategy.name} devices choose their tier by rounds that all of them end together"
    if why:
        raise PlanError(f"{what}: {why}, or remove {remove}")


def _require_hidden(context: RunContext, asked: Instructions) -> None:
    """See that nothing of a device's samples passes the noise by."""
    config = context.config
    if config.privacy is not None and config.privacy.where == "central":
        _require_deltas(
            context.strategy,
            asked,
            "privacy: the noise is made for a sum of changes",
            "[privacy]",
        )
    elif config.privacy is not None and asked.chooser is not None:
        raise PlanError(
            f"privacy: with {context.strategy.name} devices choose their tier by their losses; take heterofl"
        )
    statistics = config.evaluation.data is not None and context.judged.manifest.statistics
    if statistics and config.evaluation.statistics == "query":
        raise PlanError(
            "privacy: batch norm statistics of the devices have no noise and are in no sum; set evaluation.statistics ="
            ' "server-batch", or take a norm without statistics'
        )


def _require_recipe(table: RecipeTable | None, manifest: Manifest) -> None:
    difference = "" if table is None else table.difference(manifest.recipe)
    if difference:
        raise ConfigError(
            f"model.recipe: the {difference}, in the artifacts of {manifest.arch} {manifest.tier}; export them with"
            " `shoal export --recipe FILE`, where FILE is this configuration, or change model.recipe"
        )


def _require_shared_plans(
    strategy: Strategy, tiers: Sequence[TierArtifacts], what: str, instead: str
) -> None:
    for item in tiers:
        one, other = (
            strategy.plan(PlanRequest(item.tier, device, 0, 0)) for device in ("one", "other")
        )
        if one.key != other.key:
            raise PlanError(
                f"{what} the updates of one plan, and with {strategy.name} every device has one of its own; {instead}"
            )


def _require_inputs(settings: TrainSettings, manifest: Manifest) -> None:
    if settings.micro_batch is not None and not manifest.recipe.accumulate:
        raise PlanError(
            f"{manifest.arch} {manifest.tier} was exported for whole batches, and train.micro_batch ="
            f" {settings.micro_batch}; export it with --accumulate, or accumulate = true in [model.recipe]"
        )
    if settings.proximal_mu and not manifest.recipe.proximal:
        raise PlanError(
            f"{manifest.arch} {manifest.tier} was exported without a proximal term, so proximal_mu ="
            f" {settings.proximal_mu:g} would do nothing; export it with one (model.recipe.proximal = true)"
        )
