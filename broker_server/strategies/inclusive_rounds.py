"""InclusiveFL and its baselines as strategies: which model a device is sent, and what a round's
updates amount to.

Liu et al., KDD 2022; the mathematics and the reference are in
`broker_server.strategies.inclusivefl`. Specification 3.

There is a group for each depth in use, and the server keeps a model for each: what a device is sent
is a part of no other model. The global version of the run is the model of the deepest group. All
models live in the state that is stored beside it, with the groups' momenta and optimizers.

A round's updates therefore become one mean for each group that took part, with the number of its
devices, and these become new models. The server optimizer is that of every group, FedAdam if none
is configured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from broker_server.strategies import inclusivefl
from broker_server.strategies.heterofl import plan_tier
from broker_server.strategies.inclusivefl import (
    BASELINES,
    Baseline,
    InclusiveSettings,
    InclusiveState,
)
from broker_server.strategies.ladder import stack_of
from broker_server.strategies.server_optimizer import OptimizerSettings
from broker_server.strategies.strategy import (
    Basis,
    GlobalModel,
    Merge,
    Method,
    PlanRequest,
    ServerState,
    Strategy,
)
from fleet_protocol.errors import PlanError
from fleet_protocol.frozen import FrozenModel
from models.layout import Layout
from models.slicing import CompiledPlan, Tensors
from models.tier import Tier

Weights = dict[str, NDArray[np.float32]]


class InclusiveTable(FrozenModel):
    """``[strategy.inclusivefl]``.

    Attributes:
        beta: share of the momentum in the update of a shallow model's top layer; 0.2 for GLUE, 0.5
            for NER.
        baseline: the method itself, or one that the paper compares it with (specification 3.7).
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
    """The name of the group that trains a tier."""
    return f"d{tier.depth}"


@dataclass
class GroupSums:
    """A merge in progress: by group the sum of its devices' weights, float32, and how many devices."""

    sums: dict[str, Weights] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, group: str, weights: Tensors) -> None:
        """Add the weights of one device."""
        if group not in self.sums:
            self.sums[group] = {
                name: np.array(value, np.float32) for name, value in weights.items()
            }
        else:
            for name, total in self.sums[group].items():
                np.add(total, weights[name], out=total)
        self.counts[group] = self.counts.get(group, 0) + 1

    def means(self) -> Mapping[str, Weights]:
        """By group that took part, the mean of its devices' weights; the sums are spent."""
        for group, sums in self.sums.items():
            for total in sums.values():
                np.divide(total, self.counts[group], out=total)
        return self.sums


def build(basis: Basis[InclusiveTable]) -> Strategy:
    """The strategy as configured.

    Raises:
        PlanError: settings of width-cut methods are given, or the model has no layers or no fitting
            tier.
    """
    own: Mapping[str, object] = {
        "weighting": "uniform",
        "label_rule": False,
    }  # what it does, and may be told to do
    given = [key for key, value in own.items() if getattr(basis, key) not in {None, value}]
    given += ["plan"] if basis.plan != "static" else []
    if given:
        raise PlanError(
            f"inclusivefl cuts by depth and takes the plain mean of each group, so {given[0]} has no place; remove it"
        )
    baseline = BASELINES[basis.options.baseline]
    if baseline.alone and basis.optimizer is not None:
        raise PlanError(
            "inclusivefl: in the baseline local every device keeps its own weights; remove server_optimizer"
        )
    layout = basis.layout
    in_use = _tiers(layout, basis.tiers, baseline)
    stack_of(layout)  # refuses models without layers
    alone = Strategy(
        name="inclusivefl",
        paper="https://arxiv.org/abs/2202.08036",
        tiers=in_use,
        plan=lambda request: plan_tier(layout, request, own=True),
        merge=Merge(
            GroupSums,
            lambda sums, update: sums.add(update.device, update.weights),
            _keep_alone,
        ),
        begin=lambda _, heads: {
            f"heads/{t.id}/{name}": v for t, head in heads.items() for name, v in head.items()
        },
        send=lambda plan, request, model: _send_alone(layout, plan, request, model),
    )
    if baseline.alone:
        return alone
    chosen = basis.optimizer or OptimizerSettings(name="fedadam")
    rounds = _Rounds(
        layout,
        {group_name(tier): tier.depth for tier in in_use},
        baseline.settings(InclusiveSettings(basis.options.beta, chosen)),
    )
    return replace(
        alone,
        plan=lambda request: plan_tier(layout, request),
        merge=Merge(
            GroupSums,
            lambda sums, update: sums.add(group_name(update.tier), update.weights),
            rounds.finish,
        ),
        begin=rounds.begin,
        send=rounds.send,
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


@dataclass(frozen=True)
class _Rounds:
    """The method for one run."""

    layout: Layout
    depths: Mapping[str, int]
    settings: InclusiveSettings

    def _state(self, model: GlobalModel) -> InclusiveState:
        if model.state:
            return inclusivefl.state_from_tensors(self.layout, self.depths, model.state)
        return inclusivefl.init(self.layout, self.depths, model.weights, self.settings)

    def begin(self, weights: Tensors, heads: Mapping[Tier, Tensors]) -> ServerState:
        """The state of groups with heads of their own, which are in no other group's weights."""
        own = {group_name(tier): head for tier, head in heads.items()}
        return inclusivefl.state_tensors(
            inclusivefl.init(self.layout, self.depths, weights, self.settings, own)
        )

    def send(self, plan: CompiledPlan, request: PlanRequest, model: GlobalModel) -> Tensors:
        """The model of the device's group."""
        if not model.state:
            return plan.slice(model.weights)  # every group starts from the bottom of the same model
        group = group_name(request.tier)
        return {
            name: model.state[f"{group}/model/{name}"] for name in self.layout.shapes(request.tier)
        }

    def finish(self, sums: GroupSums, old: GlobalModel) -> GlobalModel:
        """One round of `inclusivefl.apply`; the weights are those of the deepest group."""
        state = self._state(old)
        means = sums.means()
        updates = {
            group: {name: mean[name] - value for name, value in state.models[group].items()}
            for group, mean in means.items()
        }
        new, _ = inclusivefl.apply(state, updates, sums.counts, self.settings)
        own = {
            item.name for item in self.layout.own_head(self.layout.tier(1.0, new.ladder.deepest))
        }
        deepest = new.models[new.ladder.groups[-1]]
        # A baseline of shallow models leaves the rest of the global model as it was, its head too
        # if that is another.
        kept = deepest.keys() - own
        whole = {
            name: np.array(deepest[name] if name in kept else value)
            for name, value in old.weights.items()
        }
        return GlobalModel(whole, inclusivefl.state_tensors(new))


# The baseline "local": the server keeps the weights of every device for it and merges nothing.


def _keep_alone(sums: GroupSums, old: GlobalModel) -> GlobalModel:
    own = {
        f"{device}/{name}": value
        for device, mean in sums.means().items()
        for name, value in mean.items()
    }
    return GlobalModel(
        {name: np.array(value) for name, value in old.weights.items()},
        {**old.state, **own},
    )


def _send_alone(
    layout: Layout, plan: CompiledPlan, request: PlanRequest, model: GlobalModel
) -> Tensors:
    names = list(layout.shapes(request.tier))
    stored = model.state
    own = {
        name: stored[f"{request.device}/{name}"]
        for name in names
        if f"{request.device}/{name}" in stored
    }
    if len(own) == len(names):
        return own
    head = {
        item.name: stored[f"heads/{request.tier.id}/{item.name}"]
        for item in layout.own_head(request.tier)
    }
    return {**plan.slice(model.weights), **head}


STRATEGIES = {"inclusivefl": Method(build, InclusiveTable)}
