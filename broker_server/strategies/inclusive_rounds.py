"""InclusiveFL and its baselines as strategies: which model a device is sent, and what a round's updates amount to.

Liu et al., KDD 2022; the mathematics and the reference are in `broker_server.strategies.inclusivefl`. METHODS 3.

There is a group for each depth in use, and the server keeps a model for each: what a device is sent is a part of no
other model. The global version of the run is the model of the deepest group. All models live in the state that is
stored beside it, with the groups' momenta and optimizers.

The merge therefore gives one mean for each group that took part, under the names ``<group>/<parameter>``, and the
number of its devices; the step turns these into new models. The server optimizer is that of every group, FedAdam if
none is configured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker_server.config import StrategyConfig
from broker_server.server_optimizer import OptimizerSettings
from broker_server.strategies import inclusivefl
from broker_server.strategies.inclusivefl import BASELINES, Baseline, InclusiveSettings, InclusiveState
from broker_server.strategies.ladder import stack_of
from broker_server.strategies.strategy import Contribution, PlannedTier, PlanRequest, ServerState, Strategy
from fleet_protocol.errors import PlanError
from models.layout import Layout
from models.plan import CompiledPlan, make_plan
from models.slicing import Tensors
from models.tier import Tier

__all__ = ["GroupSums", "build", "group_of"]

Weights = dict[str, NDArray[np.float32]]
_COUNT = "count"


def group_of(tier: Tier) -> str:
    """The name of the group that trains a tier."""
    return f"d{tier.depth}"


@dataclass
class GroupSums:
    """A merge in progress.

    Attributes:
        sums: by group, the sum of its devices' weights, float32.
        counts: by group, how many devices.
    """

    sums: dict[str, Weights] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, group: str, weights: Tensors) -> None:
        """Add the weights of one device."""
        if group not in self.sums:
            self.sums[group] = {name: np.array(value, np.float32) for name, value in weights.items()}
        else:
            for name, total in self.sums[group].items():
                np.add(total, weights[name], out=total)
        self.counts[group] = self.counts.get(group, 0) + 1

    def means(self) -> Weights:
        """The mean of each group and the number of its devices, in one mapping; the sums are spent."""
        flat: Weights = {}
        for group, sums in self.sums.items():
            for name, total in sums.items():
                np.divide(total, self.counts[group], out=total)
                flat[f"{group}/{name}"] = total
            flat[f"{group}/{_COUNT}"] = np.array(self.counts[group], np.float32)
        return flat


def build(config: StrategyConfig, optimizer: OptimizerSettings | None = None) -> Strategy:
    """The strategy as configured.

    Args:
        config: ``inclusivefl``.
        optimizer: of every group; None for FedAdam.

    Raises:
        PlanError: settings of width-cut methods are given.
    """
    given = [key for key in ("weighting", "label_rule") if getattr(config, key) is not None]
    given += ["plan"] if config.plan != "static" else []
    if given:
        raise PlanError(
            f"inclusivefl cuts by depth and takes the plain mean of each group, so {given[0]} has no place; remove it"
        )
    baseline = BASELINES[config.inclusivefl.baseline]
    if baseline.alone and optimizer is not None:
        raise PlanError(
            "inclusivefl: in the baseline local every device keeps its own weights; remove server_optimizer"
        )
    chosen = optimizer or OptimizerSettings("fedadam")
    settings = baseline.settings(InclusiveSettings(config.inclusivefl.beta, chosen))

    def tiers(layout: Layout, offered: Sequence[Tier]) -> tuple[Tier, ...]:
        return _tiers(layout, offered, baseline)

    def for_run(strategy: Strategy, layout: Layout, in_use: Sequence[Tier]) -> Strategy:
        stack_of(layout)  # refuses models without layers
        if baseline.alone:
            return strategy
        depths = {group_of(tier): tier.depth for tier in in_use}
        rounds = _Rounds(layout, depths, settings)
        return replace(strategy, send=rounds.send, step=rounds.step, begin=rounds.begin)

    return Strategy(
        name="inclusivefl",
        paper="https://arxiv.org/abs/2202.08036",
        tiers=tiers,
        plan=_plan_alone if baseline.alone else _plan,
        start=lambda _layout: GroupSums(),
        fold=_fold_alone if baseline.alone else _fold,
        finish=lambda sums, _old: sums.means(),
        step=_keep_alone,
        begin=_begin_alone,
        send=_send_alone,
        for_run=for_run,
        optimized=lambda _strategy, given: build(config, given),
    )


def _tiers(layout: Layout, offered: Sequence[Tier], baseline: Baseline) -> tuple[Tier, ...]:
    """The tiers of full width, deepest first, of which a baseline may take only one."""
    usable = sorted((tier for tier in offered if tier.width == 1.0), key=lambda tier: -tier.depth)
    if not usable:
        raise PlanError(
            f"inclusivefl cuts {layout.arch} by depth, but no tier of width 1 is in use; export it with --depths and"
            " without further widths"
        )
    if usable[0].depth != layout.depth and baseline.depth != "smallest":
        raise PlanError(
            f"inclusivefl: the whole model {layout.tier(1.0).id} must be in use, since a run ends with the model"
            " of the deepest group"
        )
    if baseline.takes_part == "largest" or baseline.depth == "largest":
        return (usable[0],)
    return (usable[-1],) if baseline.depth == "smallest" else tuple(usable)


def _plan(request: PlanRequest) -> PlannedTier:
    return PlannedTier(request.tier.id, make_plan(request.layout, request.tier))


def _fold(sums: GroupSums, update: Contribution) -> None:
    sums.add(group_of(Tier.parse(update.key)), update.weights)


@dataclass(frozen=True)
class _Rounds:
    """The method for one run.

    Attributes:
        layout: of the deepest model.
        depths: by group.
        settings: of the method.
    """

    layout: Layout
    depths: Mapping[str, int]
    settings: InclusiveSettings

    def _state(self, weights: Tensors, stored: ServerState) -> InclusiveState:
        if stored:
            return inclusivefl.state_from_tensors(self.layout, self.depths, stored)
        return inclusivefl.init(self.layout, self.depths, weights, self.settings)

    def begin(self, layout: Layout, weights: Tensors, heads: Mapping[Tier, Tensors]) -> ServerState:
        """The state of groups with heads of their own, which are in no other group's weights."""
        own = {group_of(tier): head for tier, head in heads.items()}
        return inclusivefl.state_tensors(inclusivefl.init(layout, self.depths, weights, self.settings, own))

    def send(
        self, plan: CompiledPlan, request: PlanRequest, weights: Tensors, stored: ServerState
    ) -> Mapping[str, NDArray[Any]]:
        """The model of the device's group."""
        if not stored:
            return plan.slice(weights)  # every group starts from the bottom of the same model
        group = group_of(request.tier)
        return {name: stored[f"{group}/model/{name}"] for name in self.layout.shapes(request.tier)}

    def step(self, old: Tensors, merged: Weights, stored: ServerState) -> tuple[Weights, ServerState]:
        """One round of `inclusivefl.apply`; the weights are those of the deepest group."""
        state = self._state(old, stored)
        counts = {group: int(merged[f"{group}/{_COUNT}"]) for group in self.depths if f"{group}/{_COUNT}" in merged}
        updates = {
            group: {name: merged[f"{group}/{name}"] - value for name, value in state.models[group].items()}
            for group in counts
        }
        new, _ = inclusivefl.apply(state, updates, counts, self.settings)
        own = {item.name for item in self.layout.own_head(self.layout.tier(1.0, new.ladder.deepest))}
        deepest = new.models[new.ladder.groups[-1]]
        # A baseline of shallow models leaves the rest of the global model as it was, its head too if that is another.
        kept = deepest.keys() - own
        whole = {name: np.array(deepest[name] if name in kept else value) for name, value in old.items()}
        return whole, inclusivefl.state_tensors(new)


# The baseline "local": the server keeps the weights of every device for it and merges nothing.


def _plan_alone(request: PlanRequest) -> PlannedTier:
    return PlannedTier(f"{request.tier.id}/{request.device}", make_plan(request.layout, request.tier))


def _fold_alone(sums: GroupSums, update: Contribution) -> None:
    sums.add(update.device, update.weights)


def _begin_alone(_layout: Layout, _weights: Tensors, heads: Mapping[Tier, Tensors]) -> ServerState:
    return {f"heads/{tier.id}/{name}": value for tier, head in heads.items() for name, value in head.items()}


def _send_alone(
    plan: CompiledPlan, request: PlanRequest, weights: Tensors, stored: ServerState
) -> Mapping[str, NDArray[Any]]:
    names = list(request.layout.shapes(request.tier))
    own = {name: stored[f"{request.device}/{name}"] for name in names if f"{request.device}/{name}" in stored}
    if len(own) == len(names):
        return own
    head = request.layout.own_head(request.tier)
    return {**plan.slice(weights), **{item.name: stored[f"heads/{request.tier.id}/{item.name}"] for item in head}}


def _keep_alone(old: Tensors, merged: Weights, stored: ServerState) -> tuple[Weights, ServerState]:
    return {name: np.array(value) for name, value in old.items()}, {**stored, **merged}
