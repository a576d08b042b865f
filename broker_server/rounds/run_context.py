"""What is fixed for a run: its name, configuration, artifacts, tiers and strategy, all checked."""

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from broker_server.rounds.artifacts import Artifacts, TierArtifacts
from broker_server.rounds.best import metric_names, require_metric
from broker_server.rounds.run_checks import require_inputs, require_recipe
from broker_server.rounds.run_method import RunMethod, build_method
from broker_server.settings.combinations import keeps
from broker_server.settings.fleet import FleetConfig
from broker_server.store.records import RunRecord
from broker_server.strategies.strategy import Strategy
from broker_server.strategies.traits import Trait
from fleet_protocol.data.terms import DataContract
from fleet_protocol.errors import ConfigError
from fleet_protocol.manifest import Manifest
from fleet_protocol.messages import BlobRef
from fleet_protocol.noise import Draw
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
        method: how it trains and merges, with its configuration.
        artifacts: all exported tiers of the model.
        tiers: in use, largest first.
        noise: random bytes for what a name says; those of the operating system, which nobody can
            draw again.
        contracts: the data contract of the devices of each tier, by tier.
        sets: by tier, artifact sets that a device has tested and trains instead of those of the
            run.
    """

    run: str
    method: RunMethod
    artifacts: Artifacts
    tiers: tuple[TierArtifacts, ...]
    noise: Callable[[str], Draw] = lambda _name: os.urandom
    sets: Callable[[str], Mapping[str, tuple[Manifest, BlobRef]]] = lambda _device: {}
    contracts: Mapping[str, DataContract] = field(default_factory=dict)

    @property
    def chunk_bytes(self) -> int:
        """Return the payload bytes of a chunk: as configured, or as many as the broker takes."""
        return self.artifacts.full.ref.chunk_bytes

    @property
    def config(self) -> FleetConfig:
        """Return the configuration of the run, with absolute paths."""
        return self.method.config

    @property
    def strategy(self) -> Strategy:
        """Return the method of the run, as configured."""
        return self.method.strategy

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
    exported = [tier_set.tier for tier_set in artifacts.tiers.values()]
    method = build_method(config, artifacts.layout, exported)
    tiers = tuple(artifacts.tiers[tier.id] for tier in method.tiers)
    context = RunContext(run, method, artifacts, tiers, noise)
    train = method.instructions("train", 0).train
    for tier_set in tiers:
        manifest = tier_set.manifest
        require_inputs(train, manifest.recipe, f"{manifest.arch} {manifest.tier}")
        require_recipe(config.model.recipe, manifest)
    if config.evaluation.data is not None:
        recipe = context.judged.manifest.recipe
        further = [metric.name for metric in recipe.metrics]
        require_metric(config.evaluation, metric_names(recipe.loss.metrics, further))
        _warn_of_untrained(context)
    return context


def _warn_of_untrained(context: RunContext) -> None:
    """Warn if the whole model is judged, of which devices train a part alone."""
    whole = context.config.evaluation.tier is None
    if whole and context.judged not in context.tiers and context.method.moving is None:
        _LOG.warning(
            "what is judged is the whole model, %s, of which devices train no more than %s"
            " (tiers.allowed): set evaluation.tier to that",
            context.judged.tier.id,
            context.tiers[0].tier.id,
        )
