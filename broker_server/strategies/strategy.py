"""Define what a strategy is: how to cut, how to merge, how to step the server's optimizer.

A module of this package builds the strategy of one paper.

A strategy is a frozen record of values and functions, built for one model and the tiers in use;
there is no base class. The server carries a `GlobalModel` from round to round: the weights and,
beside them, the arrays that the method must have again (moments, a model for each depth). They are
stored with every global version, so that a server that was killed continues with them.

Most methods set a few fields and take `broker_server.strategies.heterofl` for the rest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from broker_server.strategies.optimizer_rules import OptimizerSettings
from broker_server.strategies.server_optimizer import server_step
from broker_server.strategies.traits import Trait
from fleet_protocol.frozen import FrozenModel
from fleet_protocol.messages import Instructions, TaskMetrics
from models.layout import Layout
from models.plan import Plan
from models.slicing import CompiledPlan, Tensors
from models.tier import Tier

OptionsT = TypeVar("OptionsT", bound=FrozenModel | None)
OptionsT_co = TypeVar("OptionsT_co", bound=FrozenModel | None, covariant=True)
SumsT = TypeVar("SumsT")

Average = Literal["mean", "median", "trimmed_mean"]
"""How the values that devices have for one entry become one."""

Weighting = Literal["uniform", "samples"]
"""How much an update counts: every update alike, or by its number of samples."""

ServerState = Mapping[str, NDArray[Any]]
"""Arrays that a method carries between rounds beside the weights; empty for most."""
Weights = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class StrategySettings(Generic[OptionsT_co]):
    """What the configuration says about the method.

    Attributes:
        plan: which units a narrower sub-model keeps.
        weighting: None takes the strategy's own default.
        label_rule: take rows of label axes only for labels the device holds; None takes the
            strategy's own default.
        options: the table of the method itself; None for methods without one.
        average: how the values of an entry become one.
        faulty: share of the devices that may be bad, in [0, 0.5); the trimmed mean leaves out so
            many at either end.
        file: of the user, which has the strategy; None for one of Shoal's or of a package.
    """

    name: str
    plan: Literal["static", "rolling", "random"]
    weighting: Weighting | None
    label_rule: bool | None
    options: OptionsT_co
    average: Average = "mean"
    faulty: float = 0.2
    file: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Basis(StrategySettings[OptionsT_co]):
    """What a strategy is built from: its settings, and the model, tiers and optimizer in use.

    Attributes:
        layout: the global model.
        tiers: those that are exported and allowed, largest first.
        optimizer: the server's optimizer; None leaves the step to the strategy.
    """

    layout: Layout
    tiers: Sequence[Tier]
    optimizer: OptimizerSettings | None = None


@dataclass(frozen=True)
class PlanRequest:
    """A request for the plan of one device in one round.

    Attributes:
        version: number of closed rounds, the round index of the papers (from 0).
        seed: seed of the run.
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
        """The plan, made on first use: the same plan of a thousand devices is made once."""
        return self.make()


@dataclass(frozen=True)
class Contribution:
    """A checked update on its way into the accumulator.

    Attributes:
        key: name of the update's plan.
        plan: the entries that the update holds.
        weights: the update's tensors, views of a mapped file.
    """

    device: str
    tier: Tier
    key: str
    plan: CompiledPlan
    weights: Tensors
    metrics: TaskMetrics


@dataclass(frozen=True)
class GlobalModel:
    """The weights of the whole model, float32, and the arrays that the method keeps beside them.

    Before the first round the state is empty.
    """

    weights: Tensors
    state: ServerState


@dataclass(frozen=True)
class Merge(Generic[SumsT]):
    """How the updates of a round become the next global model, one update at a time.

    Attributes:
        start: return an empty accumulator.
        fold: add one contribution; called in ascending order of the devices' ids.
        finish: return the next global model, from the accumulator, which is spent, and the model
            the round started from, whose state may be overwritten.
        average: how the values of an entry become one; a merge of the method's own is a mean.
        deltas: whether the global model moves by the mean, for each entry, of how far the updates
            have moved it. Then an update that was made from an earlier model can move a later one,
            and all can count alike where noise is added. Not so where a fold has weights of its
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
    """Return a `Merge.finish` that averages, and lets the server's optimizer step to the average.

    Args:
        average: returns merged weights, from the accumulator and the weights the round started
            from.
        optimizer: None takes the merged weights as they are.
    """
    if optimizer is None:
        return lambda sums, old: GlobalModel(average(sums, old.weights), old.state)
    step = server_step(optimizer)

    def finish(sums: SumsT, old: GlobalModel) -> GlobalModel:
        merged = average(sums, old.weights)
        weights, state = step(old.weights, merged, old.state)
        return GlobalModel(weights, state)

    return finish


def _send_slice(
    plan: CompiledPlan,
    _request: PlanRequest,
    model: GlobalModel,
) -> Tensors:
    return plan.slice(model.weights)


def _offer_largest(largest: Tier) -> tuple[Tier, ...]:
    return (largest,)


def _same_instructions(instructions: Instructions, _closed_rounds: int) -> Instructions:
    return instructions


@dataclass(frozen=True)
class Strategy:
    """How one method plans and merges, for one model and the tiers in use.

    Attributes:
        tiers: those of the offered tiers that the method uses.
        plan: the plan for one device; a pure function, so that a server that was killed makes the
            same plan again.
        merge: how updates become the next global model; the accumulator may be of any type.
        begin: the state of a run before its first round, from the initial weights and the weights
            of the heads that single tiers have for themselves; None for a method that has no place
            for such heads.
        send: the tensors that a device is sent, from plan, request and global model; for most the
            plan's slice of the global model.
        offer: the tiers that a device is offered, its default first, from the largest it can
            train.
        instruct: the instructions of a training task, from those that every method gives and the
            number of rounds closed so far.
        stays: parameters that stay on the devices: each trains its own, and they are in no update.
        renews_units: whether the kept units mean something else in each round although the plan
            stays the same, so that devices cannot keep anything of them.
        needs: traits without which the method does not do what it promises, beside those that
            follow from the other fields.
        breaks: traits that a run with the method does not have, beside those that follow from the
            other fields: where devices choose or keep something, plans move, or a merge is no mean
            of changes.
    """

    name: str
    paper: str
    tiers: tuple[Tier, ...]
    plan: Callable[[PlanRequest], PlannedTier]
    merge: Merge[Any]
    begin: Callable[[Tensors, Mapping[Tier, Tensors]], ServerState] | None = None
    send: Callable[[CompiledPlan, PlanRequest, GlobalModel], Tensors] = _send_slice
    offer: Callable[[Tier], tuple[Tier, ...]] = _offer_largest
    instruct: Callable[[Instructions, int], Instructions] = _same_instructions
    stays: tuple[str, ...] = ()
    renews_units: bool = False
    needs: frozenset[Trait] = frozenset()
    breaks: frozenset[Trait] = frozenset()


@dataclass(frozen=True)
class Method(Generic[OptionsT]):
    """A row of the table of strategies, which the module of a method has under the method's name.

    Attributes:
        build: builds the strategy. Raises PlanError, before anything is trained, where settings,
            model, tiers and optimizer do not fit together.
        settings: the type of ``[strategy.<name>]``, the table of the method itself; None for
            methods without one.
    """

    build: Callable[[Basis[OptionsT]], Strategy]
    settings: type[OptionsT] | None = None
