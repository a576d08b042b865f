"""What a strategy is: how to cut, how to merge, how to step the server's optimizer.

One file per paper builds one.

A strategy is a frozen record of values and functions, built for one model and the tiers in use;
there is no base class. What the server carries from round to round is a `GlobalModel`: the weights,
and beside them whatever the method must know again (moments, per-depth copies), as arrays that are
stored with every global version, so that a server that is killed goes on with them.

Most methods set a few fields and take `broker_server.strategies.heterofl` for the rest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from broker_server.strategies.server_optimizer import OptimizerSettings, server_step
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import Instructions, TaskMetrics
from models.layout import Layout
from models.plan import Plan
from models.slicing import CompiledPlan, Tensors
from models.tier import Tier

OwnT = TypeVar("OwnT", bound=FrozenModel | None)
OwnT_co = TypeVar("OwnT_co", bound=FrozenModel | None, covariant=True)
SumsT = TypeVar("SumsT")

Average = Literal["mean", "median", "trimmed_mean"]
"""What becomes of the values that devices have for one entry."""

ServerState = Mapping[str, NDArray[Any]]
"""Arrays that a method carries between rounds beside the weights; empty for most."""
Weights = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class StrategySettings(Generic[OwnT_co]):
    """What the configuration says about the method.

    Attributes:
        plan: which units a narrower sub-model keeps.
        weighting: every update alike, or by its number of samples; None takes the strategy's own.
        label_rule: take rows of label axes only for labels the device holds; None takes the
            strategy's own.
        options: the table of the method's own; None for methods without.
        average: how the values of an entry become one.
        faulty: share of the devices that may be bad, in [0, 0.5); the trimmed mean leaves out so
            many at either end.
    """

    name: str
    plan: Literal["static", "rolling", "random"]
    weighting: Literal["uniform", "samples"] | None
    label_rule: bool | None
    options: OwnT_co
    average: Average = "mean"
    faulty: float = 0.2


@dataclass(frozen=True, kw_only=True)
class Basis(StrategySettings[OwnT_co]):
    """What a strategy is built from: the settings, and what they are for."""

    layout: Layout  # the global model
    tiers: Sequence[Tier]  # that are exported and allowed, largest first
    optimizer: OptimizerSettings | None = (
        None  # of the server; None for what the strategy does by itself
    )


@dataclass(frozen=True)
class PlanRequest:
    """For whom a plan is wanted.

    `version` counts closed rounds, the round index of the papers (from 0).
    """

    tier: Tier
    device: str
    version: int
    seed: int


@dataclass(frozen=True)
class PlannedTier:
    """A plan with a name, unique within a round.

    Devices whose plans share a name share one blob of weights.
    """

    key: str
    make: Callable[[], Plan]

    @cached_property
    def plan(self) -> Plan:
        """The plan, made when it is asked for: that of a thousand devices is made once."""
        return self.make()


@dataclass(frozen=True)
class Contribution:
    """A checked update on its way into the accumulator."""

    device: str
    tier: Tier
    key: str  # name of its plan
    plan: CompiledPlan  # what it holds
    weights: Tensors  # its tensors, views of a mapped file
    metrics: TaskMetrics


@dataclass(frozen=True)
class GlobalModel:
    """The whole model's weights, float32, and what the method keeps beside them, empty before the
    first round.
    """

    weights: Tensors
    state: ServerState


@dataclass(frozen=True)
class Merge(Generic[SumsT]):
    """How the updates of a round become the next global model, one update at a time.

    Attributes:
        start: an empty accumulator.
        fold: add one contribution; called in ascending order of the devices' ids.
        finish: the next global model, from the accumulator, which is spent, and the model the round
            started from. The state it is given may be overwritten.
        average: what it takes of the values of an entry; a merge of the method's own is a mean.
        deltas: whether the global model moves by the mean, for each entry, of how far the updates
            have moved it; then an update that was made from an earlier model can move a later one,
            and all can count alike where noise is added. So not where a fold has weights of its
            own.
    """

    start: Callable[[], SumsT]
    fold: Callable[[SumsT, Contribution], None]
    finish: Callable[[SumsT, GlobalModel], GlobalModel]
    average: Average = "mean"
    deltas: bool = False


def average_and_step(
    average: Callable[[SumsT, Tensors], Weights], optimizer: OptimizerSettings | None
) -> Callable[[SumsT, GlobalModel], GlobalModel]:
    """Finish a merge by an average and a step of the server's optimizer, if any, towards it.

    The average makes merged weights of the accumulator and the weights the round started from.
    """
    if optimizer is None:
        return lambda sums, old: GlobalModel(average(sums, old.weights), old.state)
    step = server_step(optimizer)

    def finish(sums: SumsT, old: GlobalModel) -> GlobalModel:
        return GlobalModel(*step(old.weights, average(sums, old.weights), old.state))

    return finish


@dataclass(frozen=True)
class Strategy:
    """How one method plans and merges, for one model and the tiers in use.

    Attributes:
        tiers: of those it was offered, the ones it uses.
        plan: the plan for one device; a pure function, so that a killed server makes the same one
            again.
        merge: how updates become the next global model; the accumulator may be of any type.
        begin: the state of a run before its first round, from the initial weights and those of the
            heads that tiers in use have of their own; None for a method that has no place for such
            heads.
        send: the tensors that a device is sent, from plan, request and global model; for most the
            plan's part of it.
        offer: the tiers that a device is offered, the one it takes by default first, from the
            largest it can train.
        instruct: what it changes in what a training task asks of a device, given the rounds closed
            so far.
        stays: parameters that stay on the devices: each trains its own, and they are in no update.
        renews_units: whether the units of a plan that stays are others in each round, so that devices keep
            nothing of them.
    """

    name: str
    paper: str
    tiers: tuple[Tier, ...]
    plan: Callable[[PlanRequest], PlannedTier]
    merge: Merge[Any]
    begin: Callable[[Tensors, Mapping[Tier, Tensors]], ServerState] | None = None
    send: Callable[[CompiledPlan, PlanRequest, GlobalModel], Tensors] = lambda plan, _, model: (
        plan.slice(model.weights)
    )
    offer: Callable[[Tier], tuple[Tier, ...]] = lambda largest: (largest,)
    instruct: Callable[[Instructions, int], Instructions] = lambda asked, _: asked
    stays: tuple[str, ...] = ()
    renews_units: bool = False


@dataclass(frozen=True)
class Method(Generic[OwnT]):
    """A row of the table of strategies: the module of a method has one under the method's name.

    Attributes:
        build: makes the strategy. Raises PlanError, before anything is trained, where its basis
            does not go together.
        settings: of ``[strategy.<name>]``, the table of the method's own; None for methods without.
    """

    build: Callable[[Basis[OwnT]], Strategy]
    settings: type[OwnT] | None = None
