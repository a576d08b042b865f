"""Builds InclusiveFL and its baselines as strategies.

Liu et al., KDD 2022; `broker_server.strategies.inclusivefl` has the mathematics and the reference.
Specification 3.

There is a group for each depth in use, and the server keeps a model for each group, so a device is
sent its group's model, which is not cut from another. The global version of the run is the model of
the deepest group. All models are in the state that is stored beside it, with the groups' momenta
and optimizers.

The updates of a round become one mean for each group that took part, with the number of its
devices, and these means become new models. Every group has the configured server optimizer, or
FedAdam if none is configured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from broker_server.strategies import inclusivefl
from broker_server.strategies.heterofl import plan_tier
from broker_server.strategies.inclusive_state import (
    InclusiveState,
    state_from_tensors,
    state_tensors,
)
from broker_server.strategies.inclusivefl import BASELINES, Baseline, InclusiveSettings
from broker_server.strategies.ladder import stack_of
from broker_server.strategies.optimizer_rules import OptimizerSettings
from broker_server.strategies.strategy import (
    Basis,
    Contribution,
    GlobalModel,
    Merge,
    Method,
    PlanRequest,
    ServerState,
    Strategy,
)
from broker_server.strategies.traits import Trait
from fleet_protocol.errors import PlanError
from fleet_protocol.frozen import FrozenModel
from models.layout import Layout
from models.slicing import CompiledPlan, Tensors
from models.tier import WHOLE_SHARE, Tier

Weights = dict[str, NDArray[np.float32]]


class InclusiveTable(FrozenModel):
    """``[strategy.inclusivefl]``.

    Attributes:
        beta: share of the momentum in the update of a shallow model's top layer; the paper uses 0.2
            for GLUE and 0.5 for NER.
        baseline: the method itself, or a baseline to which the paper compares it (specification
            3.7).
    """

    beta: float = Field(default=0.2, ge=0, le=1)
    baseline: Literal[
        "inclusive",
        "without_distillation",
        "distillation_only",
        "all_large",
        "all_small",
        "exclusive",
        "local",
    ] = "inclusive"


def group_name(tier: Tier) -> str:
    """Return the name of the group that trains a tier."""
    return f"d{tier.depth}"


@dataclass
class GroupSums:
    """A merge in progress.

    Attributes:
        sums: sum of the devices' weights of each group, float32.
        counts: number of devices that took part, by group.
    """

    sums: dict[str, Weights] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(
        self,
        group: str,
        weights: Tensors,
    ) -> None:
        """Add the weights of one device."""
        sums = self.sums.get(group)
        if sums is None:
            # A copy, because an update's tensors are views of a file.
            self.sums[group] = {
                name: np.array(value, np.float32) for name, value in weights.items()
            }
        else:
            for name, total in sums.items():
                np.add(total, weights[name], out=total)
        self.counts[group] = self.counts.get(group, 0) + 1

    def means(self) -> Mapping[str, Weights]:
        """Return the mean of the devices' weights by group; the sums are spent."""
        for group, sums in self.sums.items():
            for total in sums.values():
                np.divide(total, self.counts[group], out=total)
        return self.sums


def build(basis: Basis[InclusiveTable]) -> Strategy:
    """Build the strategy from its settings.

    Raises:
        PlanError: settings of width-cut methods are configured, or the model has no layers or no
            fitting tier.
    """
    _check_settings(basis)
    baseline = BASELINES[basis.options.baseline]
    # Nothing is merged, so there is nothing that an optimizer could step.
    if baseline.alone and basis.optimizer is not None:
        raise PlanError(
            "inclusivefl: in the baseline local every device keeps its own weights; remove "
            "server_optimizer"
        )
    layout = basis.layout
    tiers = _tiers_in_use(layout, basis.tiers, baseline)
    stack_of(layout)  # refuses models without layers
    rounds: _LocalRounds | _GroupRounds
    if baseline.alone:
        rounds = _LocalRounds(layout)
    else:
        # The paper's default.
        optimizer = basis.optimizer or OptimizerSettings(name="fedadam")
        settings = baseline.settings(InclusiveSettings(basis.options.beta, optimizer))
        depths = {group_name(tier): tier.depth for tier in tiers}
        rounds = _GroupRounds(layout, depths, settings)
    # A group moves by its own mean and by the momentum of deeper ones.
    breaks = {Trait.MEAN_OF_CHANGES}
    needs: set[Trait] = set()
    if baseline.alone:
        breaks.add(Trait.SHARED_PLANS)
        # The server stores whole models, to send each device its own again.
        needs.add(Trait.ALL_MERGED)
    return Strategy(
        name="inclusivefl",
        paper="https://arxiv.org/abs/2202.08036",
        tiers=tiers,
        plan=lambda request: plan_tier(layout, request, per_device=baseline.alone),
        merge=Merge(GroupSums, rounds.fold, rounds.finish),
        begin=rounds.begin,
        send=rounds.send,
        needs=frozenset(needs),
        breaks=frozenset(breaks),
    )


def _check_settings(basis: Basis[InclusiveTable]) -> None:
    """Refuse settings that the method does not support; its own values may be configured."""
    refused = None
    if basis.weighting not in {None, "uniform"}:
        refused = "weighting"
    elif basis.label_rule not in {None, False}:
        refused = "label_rule"
    elif basis.plan != "static":
        refused = "plan"
    if refused is not None:
        raise PlanError(
            f"inclusivefl cuts by depth and uses the plain mean of each group, so {refused} is"
            " not supported; remove it"
        )


def _tiers_in_use(
    layout: Layout,
    offered: Sequence[Tier],
    baseline: Baseline,
) -> tuple[Tier, ...]:
    """Return the tiers of full width, deepest first; a baseline may use only one of them.

    A tier that trains a share is left out: a layer's momentum goes to the layers above, so that
    each group needs all layers of its updates.
    """
    full_width: list[Tier] = []
    for tier in offered:
        if tier.width == 1.0 and tier.trained == WHOLE_SHARE:
            full_width.append(tier)
    usable = sorted(full_width, key=lambda tier: -tier.depth)
    if not usable:
        raise PlanError(
            f"inclusivefl cuts {layout.arch} by depth, but no tier of width 1 is in use; export it"
            " with --depths and without further widths"
        )
    if usable[0].depth != layout.depth and baseline.depth != "smallest":
        raise PlanError(
            f"inclusivefl: the whole model {layout.tier(1.0).id} must be in use, because a "
            "run ends with the model of the deepest group"
        )
    if baseline.takes_part == "largest" or baseline.depth == "largest":
        return (usable[0],)
    if baseline.depth == "smallest":
        return (usable[-1],)
    return tuple(usable)


@dataclass(frozen=True)
class _GroupRounds:
    """The rounds of the method, and of every baseline that merges.

    Attributes:
        depths: number of layers, by group.
    """

    layout: Layout
    depths: Mapping[str, int]
    settings: InclusiveSettings

    def begin(
        self,
        weights: Tensors,
        heads: Mapping[Tier, Tensors],
    ) -> ServerState:
        """Return the first state of groups with separate heads.

        These heads are in no other group's weights.
        """
        by_group = {group_name(tier): head for tier, head in heads.items()}
        state = inclusivefl.init(
            self.layout,
            self.depths,
            weights,
            self.settings,
            by_group,
        )
        return state_tensors(state)

    def send(
        self,
        plan: CompiledPlan,
        request: PlanRequest,
        model: GlobalModel,
    ) -> Tensors:
        """Return the model of the device's group."""
        if not model.state:
            return plan.slice(model.weights)  # every group starts from the bottom of the same model
        prefix = f"{group_name(request.tier)}/model"
        tensors = {}
        for name in self.layout.shapes(request.tier):
            # In the order of the layout, which is that of a blob of weights.
            tensors[name] = model.state[f"{prefix}/{name}"]
        return tensors

    def fold(
        self,
        sums: GroupSums,
        update: Contribution,
    ) -> None:
        """Add an update to the sum of its group."""
        sums.add(group_name(update.tier), update.weights)

    def finish(
        self,
        sums: GroupSums,
        old: GlobalModel,
    ) -> GlobalModel:
        """Run one round of `inclusivefl.apply`; the weights are those of the deepest group."""
        state = self._state(old)
        updates: dict[str, Tensors] = {}
        unsent: set[str] = set()
        for group, mean in sums.means().items():
            model = state.models[group]
            unsent.update(model.keys() - mean.keys())
            # Differences, because the method moves momentum between groups and not weights. They
            # are zero for parameters that stay on the devices.
            updates[group] = {name: mean.get(name, value) - value for name, value in model.items()}
        new, _ = inclusivefl.apply(
            state,
            updates,
            sums.counts,
            self.settings,
        )
        new = new.with_values_of(state, unsent)
        weights = self._global_weights(new, old.weights)
        return GlobalModel(weights, state_tensors(new))

    def _state(self, model: GlobalModel) -> InclusiveState:
        if model.state:
            return state_from_tensors(self.layout, self.depths, model.state)
        return inclusivefl.init(
            self.layout,
            self.depths,
            model.weights,
            self.settings,
        )

    def _global_weights(
        self,
        state: InclusiveState,
        old: Tensors,
    ) -> Weights:
        """Return the weights of the deepest group within the whole model.

        A baseline of shallow models leaves the rest of the global model as it was, and its head
        too if the shallow models have another head.
        """
        deepest = state.models[state.ladder.groups[-1]]
        deepest_tier = self.layout.tier(1.0, state.ladder.deepest)
        replaced = set(deepest)
        for parameter in self.layout.own_head(deepest_tier):
            # A separate head has other labels than the head of the global model.
            replaced.discard(parameter.name)
        weights = {}
        for name, old_value in old.items():
            weights[name] = np.array(deepest[name] if name in replaced else old_value)
        return weights


@dataclass(frozen=True)
class _LocalRounds:
    """The rounds of the baseline ``local``.

    The server stores the weights of every device for that device, and merges nothing.
    """

    layout: Layout

    def begin(
        self,
        _weights: Tensors,
        heads: Mapping[Tier, Tensors],
    ) -> ServerState:
        """Return the separate heads of tiers."""
        state = {}
        for tier, head in heads.items():
            for name, value in head.items():
                state[f"heads/{tier.id}/{name}"] = value
        return state

    def send(
        self,
        plan: CompiledPlan,
        request: PlanRequest,
        model: GlobalModel,
    ) -> Tensors:
        """Return the device's own weights; before its first update, the common initial ones."""
        names = list(self.layout.shapes(request.tier))
        own = {}
        for name in names:
            value = model.state.get(f"{request.device}/{name}")
            if value is not None:
                own[name] = value
        # All or nothing: a device with a new tier starts again from the common weights.
        if len(own) == len(names):
            return own
        tensors = dict(plan.slice(model.weights))
        for parameter in self.layout.own_head(request.tier):
            key = f"heads/{request.tier.id}/{parameter.name}"
            tensors[parameter.name] = model.state[key]
        return tensors

    def fold(
        self,
        sums: GroupSums,
        update: Contribution,
    ) -> None:
        """Store an update: every device is a separate group."""
        sums.add(update.device, update.weights)

    def finish(
        self,
        sums: GroupSums,
        old: GlobalModel,
    ) -> GlobalModel:
        """Store the devices' weights in the state; the global weights stay as they were."""
        state = dict(old.state)
        for device, weights in sums.means().items():
            for name, value in weights.items():
                state[f"{device}/{name}"] = value
        # A copy, because the old arrays may be views of a mapped file.
        global_weights = {}
        for name, value in old.weights.items():
            global_weights[name] = np.array(value)
        return GlobalModel(global_weights, state)


STRATEGIES = {"inclusivefl": Method(build, InclusiveTable)}
