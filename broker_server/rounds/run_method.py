"""Builds the method of a run from settings and a model's layout, before anything is exported.

Everything that can be refused without the exported files is refused here, for fleets and
simulations alike, because an export takes minutes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from broker_server.rounds.run_checks import require_warmup
from broker_server.rounds.tier_assignment import require_levels, usable_tiers
from broker_server.settings.combinations import features_of, method_settings, require_together
from broker_server.settings.fleet import FleetConfig
from broker_server.settings.method_features import Method, method_features
from broker_server.settings.private import kept_of
from broker_server.stages.hiding import hiding_of
from broker_server.store.privacy_spent import require_accountant
from broker_server.strategies.private_parts import keep_private
from broker_server.strategies.registry import build_strategy
from broker_server.strategies.strategy import PlanRequest, Strategy, moves_units
from broker_server.strategies.trained_window import move_windows
from fleet_protocol.messages import Instructions, TrainSettings
from fleet_protocol.messages.instructions import Hiding, Ramp, Summing, Upload
from fleet_protocol.rounding import LEVELS
from models.layout import Layout
from models.tier import Tier


@dataclass(frozen=True)
class RunMethod:
    """How a run trains and merges.

    Attributes:
        config: configuration of the run, with absolute paths.
        layout: layout of the global model.
        tiers: tiers in use, largest first.
        strategy: the configured strategy, built for these tiers.
    """

    config: FleetConfig
    layout: Layout
    tiers: tuple[Tier, ...]
    strategy: Strategy

    @property
    def moving(self) -> str | None:
        """Return a tier whose next slice may have different units from its last one.

        None if the plans of all tiers stay the same.
        """
        for tier in self.tiers:
            if moves_units(self.strategy, tier, self.config.seed):
                return tier.id
        return None

    @property
    def shared_plans(self) -> bool:
        """Return whether any two devices of a tier have the same plan."""
        for tier in self.tiers:
            # Any two ids will do: a method with a plan for each device derives it from the id.
            first = self.strategy.plan(PlanRequest(tier, "one", 0, 0))
            second = self.strategy.plan(PlanRequest(tier, "other", 0, 0))
            if first.key != second.key:
                return False
        return True

    def instructions(
        self,
        kind: Literal["train", "statistics"],
        closed_rounds: int,
        efficiencies: Sequence[float] = (),
    ) -> Instructions:
        """Return the instructions for a device's task.

        The strategy adds its part only to training.

        Args:
            kind: kind of the task.
            closed_rounds: how many rounds are closed.
            efficiencies: efficiencies of devices, for a strategy that adapts to them.
        """
        settings = self._train_settings(kind, closed_rounds)
        # A pass for statistics trains nothing, so no part of the method applies.
        if kind == "statistics":
            return Instructions(routine=kind, train=settings)
        asked = Instructions(train=settings, stays=self.strategy.stays, upload=self._upload())
        instructions = self.strategy.instruct(asked, closed_rounds)
        if self.strategy.adapt is None:
            return instructions
        return self.strategy.adapt(instructions, efficiencies)

    @property
    def pulls(self) -> Mapping[str, float]:
        """Return the strengths of the proximal terms that devices train with, by their settings."""
        pull = self.instructions("train", 0).train.proximal_mu
        return {"proximal_mu": pull, **kept_of(self.config.private).pulls}

    def _train_settings(self, kind: str, closed_rounds: int) -> TrainSettings:
        train = self.config.train
        rounds = self.config.round.rounds
        rate = train.rate_after(closed_rounds)
        ramp = None
        # After the last round, when statistics are requested, the schedule has ended.
        schedule = train.rate if kind == "train" else None
        if schedule is not None and schedule.per == "step":
            ramp = Ramp(schedule=schedule, position=closed_rounds, rounds=rounds)
        elif schedule is not None:
            # Without a ramp, the rate stays the same within a round.
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
        # The rounding error belongs to other units if plans move.
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
        return hiding_of(noise)

    def _summing(self) -> Summing | None:
        secure = self.config.secure_sum
        if secure is None:
            return None
        # With central noise the bound applies to every device, not only to their mean.
        bounding = [secure, self.config.central_noise]
        clips = [table.clip for table in bounding if table is not None]
        return Summing(clip=min(clips), least=secure.least)


def build_method(config: FleetConfig, layout: Layout, tiers: Sequence[Tier]) -> RunMethod:
    """Build the method of a run, and refuse incompatible settings.

    Args:
        config: configuration of the run.
        layout: layout of the global model.
        tiers: those that are exported, or will be, largest first.

    Raises:
        ConfigError: a name or number in the configuration is wrong.
        PlanError: method, model, tiers and settings are incompatible.
    """
    require_warmup(config)
    allowed = usable_tiers(tiers, config.tiers)
    strategy = build_strategy(method_settings(config), layout, allowed, config.server_optimizer)
    strategy = move_windows(strategy, layout, config.strategy.window, tiers)
    strategy = keep_private(strategy, layout, kept_of(config.private))
    # A method may train fewer tiers than are allowed.
    in_use = tuple(tier for tier in allowed if tier in strategy.tiers)
    require_levels(in_use, config.tiers)
    method = RunMethod(config, layout, in_use, strategy)
    # A method's needs and effects are known only once it is built and its instructions exist.
    of_method = method_features(config, _described(method))
    require_together([*features_of(config), *of_method])
    # The package is needed at the end of a round, so its absence is reported before the first.
    if config.privacy is not None:
        require_accountant()
    return method


def _described(method: RunMethod) -> Method:
    """Return the facts that decide which features a method has."""
    config = method.config
    layout = method.layout
    asked = method.instructions("train", 0)
    own_heads = []
    for tier in method.tiers:
        if layout.own_head(tier):
            own_heads.append(tier.id)
    judged = config.evaluation.data is not None
    queries = judged and config.evaluation.statistics == "query"
    return Method(
        strategy=method.strategy,
        asked=asked,
        moving=method.moving,
        shared_plans=method.shared_plans,
        own_heads=tuple(own_heads),
        judged=judged,
        statistics=queries and _judged_by_statistics(method),
        pieces=config.train.micro_batch is not None,
        keeps_optimizer=asked.train.optimizer_state == "keep",
    )


def _judged_by_statistics(method: RunMethod) -> bool:
    """Return whether the evaluated tier has batch norms whose statistics the evaluation needs."""
    layout = method.layout
    judged = method.config.evaluation.tier
    blocks = layout.blocks(layout.tier(1.0) if judged is None else Tier.parse(judged))
    return any(norm.block in blocks for norm in layout.statistics)
