"""The fixed settings of a run: name, configuration, artifacts, tiers and strategy, all checked."""

import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from broker_server.rounds.artifacts import Artifacts, TierArtifacts
from broker_server.rounds.best import metric_names, require_metric
from broker_server.rounds.run_checks import require_inputs, require_knobs, require_recipe
from broker_server.rounds.run_method import RunMethod, build_method
from broker_server.settings.combinations import keeps
from broker_server.settings.fleet import FleetConfig
from broker_server.store.records import RunRecord
from broker_server.strategies.strategy import Strategy
from broker_server.strategies.traits import Trait
from fleet_protocol.data.terms import DataContract
from fleet_protocol.errors import ConfigError
from fleet_protocol.manifest import Manifest
from fleet_protocol.memory_plans import fastest_within
from fleet_protocol.messages import BlobRef
from fleet_protocol.noise import Draw
from fleet_protocol.spelling import without_login
from models.tier import Tier

_LOG = logging.getLogger(__name__)

# Fields of a manifest that define the meaning of an update's numbers.
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
    "frozen",
    "statistics",
    "base",
)


def new_run_id() -> str:
    """Return a name for a run: its start time, and a few random digits."""
    return time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(2)


@dataclass(frozen=True)
class ReleasedSet:
    """An artifact set of a rollout, or a plan of it, and how a task names it."""

    manifest: Manifest
    ref: BlobRef


@dataclass(frozen=True)
class RunContext:
    """The fixed settings of a whole run.

    Attributes:
        run: its id.
        method: how it trains and merges, with its configuration.
        artifacts: all exported tiers of the model.
        tiers: tiers in use, largest first.
        noise: source of random bytes for each named purpose; by default the operating system, whose
            bytes nobody can reproduce.
        contracts: the data contract of the devices of each tier, by tier.
        sets: artifact sets, by tier, that a device has tested and trains instead of those of the
            run, each followed by its plans, the fastest first.
    """

    run: str
    method: RunMethod
    artifacts: Artifacts
    tiers: tuple[TierArtifacts, ...]
    noise: Callable[[str], Draw] = lambda _name: os.urandom
    sets: Callable[[str], Mapping[str, Sequence[ReleasedSet]]] = lambda _device: {}
    contracts: Mapping[str, DataContract] = field(default_factory=dict)

    @property
    def chunk_bytes(self) -> int:
        """Return the payload bytes of a chunk: as configured, or as many as the broker accepts."""
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
        """Return whether the run has a trait, as far as its settings decide it."""
        return keeps(self.config, trait)

    def set_of(
        self,
        device: str,
        tier_set: TierArtifacts,
        memory: float = math.inf,
    ) -> BlobRef:
        """Return the artifact set that a task of a device names for a tier.

        Args:
            device: the device.
            tier_set: the run's set of the tier.
            memory: bytes that training may take on the device; they decide on the plan.
        """
        before = tier_set.within(memory)
        tested = self.sets(device).get(tier_set.tier.id)
        if tested is None:
            return before.ref
        new = fastest_within(tested, memory)
        # A device keeps a set for which it has the memory, rather than get one that is too large.
        if new.manifest.peak_memory_bytes > memory >= before.manifest.peak_memory_bytes:
            return before.ref
        # A set whose updates have another meaning cannot replace the run's.
        return before.ref if self.set_difference(tier_set, new.manifest) else new.ref

    def set_difference(self, tier_set: TierArtifacts, new: Manifest) -> str:
        """Return why another artifact set cannot replace a tier's in this run.

        It is empty if it can.
        """
        old = tier_set.manifest
        fields = list(_MEANING)
        # States that boards keep between rounds must fit the new graphs, too.
        if self.config.train.optimizer_state == "keep":
            fields.append("states")
        differing = []
        for name in fields:
            if getattr(old, name) != getattr(new, name):
                differing.append(name)
        if old.recipe.loss != new.recipe.loss:
            differing.append("recipe.loss")
        # A set may bring graphs of further formats, but a board may need any of those that it was
        # offered.
        differing += [f"graph {name}" for name in old.graphs.keys() - new.graphs.keys()]
        return (
            f"{', '.join(differing)} of {tier_set.tier.id} differ from those" if differing else ""
        )

    @property
    def open_labels(self) -> bool:
        """Return whether only `labels` in ``[data]`` of the boards define what a label means.

        If a contract has names, boards follow it; if a part of the model stays on the boards, or
        tiers have separate heads, labels may differ.
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
        """Return the run as the store records it at its start, without the broker's login."""
        # Backups and everybody who may read the store would have the broker's password otherwise.
        url = without_login(self.config.broker.url)
        broker = self.config.broker.model_copy(update={"url": url})
        # The record has the name, which may change.
        stored = self.config.model_copy(update={"broker": broker, "run_name": None})
        return RunRecord(
            id=self.run,
            fleet=self.config.fleet,
            arch=self.config.model.arch,
            config=stored.model_dump_json(),
            status="running",
            detail=None,
            created_at=time.time(),
            ended_at=None,
            wire_bytes=0,
            payload_bytes=0,
            name=self.config.run_name,
        )

    def _exported(self, key: str, tier: str) -> TierArtifacts:
        exported = self.artifacts.tiers.get(tier)
        if exported is None:
            tiers = ", ".join(self.artifacts.tiers)
            raise ConfigError(f"{key}: {tier!r} is not exported; the exported tiers are {tiers}")
        if self.artifacts.layout.own_head(exported.tier) and exported not in self.tiers:
            raise ConfigError(f"{key}: {tier!r} has a separate head, which this run does not train")
        return exported


def prepare_run(
    run: str,
    config: FleetConfig,
    artifacts: Artifacts,
    noise: Callable[[str], Draw] = lambda _name: os.urandom,
) -> RunContext:
    """Build the fixed settings of a run, and refuse incompatible ones before training starts.

    Raises:
        ConfigError: a name or number in the configuration is wrong.
        PlanError: method, model, tiers and settings are incompatible.
    """
    exported = [tier_set.tier for tier_set in artifacts.tiers.values()]
    method = build_method(config, artifacts.layout, exported)
    tiers = tuple(_set_with_places(method, artifacts, tier) for tier in method.tiers)
    context = RunContext(run, method, artifacts, tiers, noise)
    # Instructions of the first round: what a graph must offer does not change between rounds.
    train = method.instructions("train", 0).train
    for tier_set in tiers:
        manifest = tier_set.manifest
        require_inputs(train, method.pulls, manifest.recipe, f"{manifest.arch} {manifest.tier}")
        require_recipe(config.model.recipe, manifest)
        loss = manifest.recipe.loss
        require_knobs(
            train,
            loss.knobs,
            loss.name,
            f"{manifest.arch} {manifest.tier}",
            all_set=method.strategy.sets_all_numbers,
        )
    if config.evaluation.data is not None:
        recipe = context.judged.manifest.recipe
        further = [metric.name for metric in recipe.reported]
        require_metric(config.evaluation, metric_names(recipe.loss.metrics, further))
        _warn_of_untrained(context)
    return context


def _set_with_places(method: RunMethod, artifacts: Artifacts, tier: Tier) -> TierArtifacts:
    """Return the artifact set of a tier with those of the places that its plans may choose."""
    places: list[TierArtifacts] = []
    for place in method.strategy.places(tier):
        if place != tier:
            places.append(artifacts.tiers[place.id])
    return replace(artifacts.tiers[tier.id], places=tuple(places))


def _warn_of_untrained(context: RunContext) -> None:
    """Warn if the whole model is evaluated although devices hold only a part of it."""
    whole = context.config.evaluation.tier is None
    judged = context.judged.tier
    # A tier that trains a share holds the whole model, and keeps what it started from below.
    is_held = False
    for tier_set in context.tiers:
        if (tier_set.tier.width, tier_set.tier.depth) == (judged.width, judged.depth):
            is_held = True
    if whole and not is_held and context.method.moving is None:
        _LOG.warning(
            "the whole model %s is evaluated, but devices train no more than %s (tiers.allowed):"
            " set evaluation.tier to the largest of these",
            judged.id,
            context.tiers[0].tier.id,
        )
