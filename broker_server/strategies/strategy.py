"""Defines a strategy: how it cuts and merges models, and how the server's optimizer steps.

A module of this package builds the strategy of one paper.

A strategy is a frozen record of values and functions, built for one model and the tiers in use;
there is no base class. The server carries a `GlobalModel` from round to round: the weights and the
arrays that the method needs again (moments, a model for each depth). They are stored with every
global version, so that a restarted server continues with them.

Most methods set a few fields and use `broker_server.strategies.heterofl` for the others.
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
"""How the devices' values of an entry are combined."""

Weighting = Literal["uniform", "samples"]
"""The weight of an update: the same for every update, or its number of samples."""

ServerState = Mapping[str, NDArray[Any]]
"""Arrays that a method carries between rounds beside the weights; empty for most."""
Weights = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class StrategySettings(Generic[OptionsT_co]):
    """The configuration of the method.

    Attributes:
        plan: which units a narrower sub-model keeps.
        weighting: None for the strategy's default.
        label_rule: merge rows of label axes only from devices that have the label; None for the
            strategy's default.
        options: the method's own table; None for methods without one.
        average: how the values of an entry are combined.
        faulty: share of the devices that may be faulty, in [0, 0.5); the trimmed mean drops that
            share at either end.
        file: file of the user, which contains the strategy; None for one of Shoal's or of a
            package.
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
    """The input for building a strategy: its settings, and the model, tiers and optimizer in use.

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
    """A checked update for the accumulator.

    Attributes:
        key: name of the update's plan.
        plan: the entries that the update contains.
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
    """The weights of the whole model, float32, and the arrays that the method stores beside them.

    Before the first round the state is empty.
    """

    weights: Tensors
    state: ServerState


@dataclass(frozen=True)
class Merge(Generic[SumsT]):
    """How a round's updates become the next global model, one update at a time.

    Attributes:
        start: return an empty accumulator.
        fold: add one contribution; called in ascending order of the devices' ids.
        finish: return the next global model, from the accumulator, which is spent, and the model
            with which the round started, whose state may be overwritten.
        average: how the values of an entry are combined; a method's own merge is a mean.
        deltas: whether the global model moves, for each entry, by the mean of the updates' changes.
            Then an update made from an earlier model can move a later one. The mean may be weighted
            if each update has one weight for all its tensors; a strategy whose updates have unequal
            weights then breaks `Trait.ALIKE`. It is false if weights differ between tensors.
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
        average: returns merged weights, from the accumulator and the weights with which the round
            started.
        optimizer: None returns the merged weights as they are.
    """
    # No step at all, and not one of size 1, whose difference and sum would change the last bits.
    if optimizer is None:
        return lambda sums, old: GlobalModel(average(sums, old.weights), old.state)
    step = server_step(optimizer)

    def finish(sums: SumsT, old: GlobalModel) -> GlobalModel:
        merged = average(sums, old.weights)
        weights, state = step(old.weights, merged, old.state)
        return GlobalModel(weights, state)

    return finish


# Defaults of `Strategy`: what most methods do.
def _send_slice(
    plan: CompiledPlan,
    _request: PlanRequest,
    model: GlobalModel,
) -> Tensors:
    return plan.slice(model.weights)


def _fixed_place(tier: Tier) -> tuple[Tier, ...]:
    return (tier,)


def _offer_largest(largest: Tier) -> tuple[Tier, ...]:
    return (largest,)


def _same_instructions(instructions: Instructions, _closed_rounds: int) -> Instructions:
    return instructions


@dataclass(frozen=True)
class Strategy:
    """How one method plans and merges, for one model and the tiers in use.

    Attributes:
        tiers: those of the offered tiers that the method uses.
        plan: the plan for one device; a pure function, so that a restarted server makes the same
            plan again.
        merge: how updates become the next global model; the accumulator may be of any type.
        begin: the state of a run before its first round, from the initial weights and the weights
            of the separate heads of tiers; None for a method that does not support such heads.
        send: the tensors that are sent to a device, from plan, request and global model; for most
            strategies the plan's slice of the global model.
        offer: the tiers that a device is offered, its default first, from the largest that it can
            train.
        places: the tiers that plans of a tier may have: at each place of its trained blocks, if
            these move.
        instruct: the instructions of a training task, from those that every method gives and the
            number of rounds closed so far.
        adapt: the instructions of a training task, from those of `instruct` and the system
            efficiencies that devices have reported, each as in its first task of the run; None for
            a method that does not need them.
        stays: parameters that stay on the devices: each trains its own, and no update contains
            them.
        keeps: parameters of which devices keep values from round to round. If their units move,
            the weights come with the units (`fleet_protocol.units`).
        sets_all_numbers: whether the method sends all numbers of its loss, so that a loss with
            further numbers is that of another method.
        renews_units: whether the kept units change their meaning in each round although the plan
            stays the same, so that devices cannot keep anything about them.
        needs: traits without which the method does not work as intended, besides those that follow
            from the other fields.
        breaks: traits that a run with the method lacks, besides those that follow from the other
            fields: if devices choose or keep something, plans move, or a merge is not a mean of
            changes.
    """

    name: str
    paper: str
    tiers: tuple[Tier, ...]
    plan: Callable[[PlanRequest], PlannedTier]
    # Only the three functions of a merge see its accumulator, so its type is not stated.
    merge: Merge[Any]
    begin: Callable[[Tensors, Mapping[Tier, Tensors]], ServerState] | None = None
    send: Callable[[CompiledPlan, PlanRequest, GlobalModel], Tensors] = _send_slice
    offer: Callable[[Tier], tuple[Tier, ...]] = _offer_largest
    places: Callable[[Tier], tuple[Tier, ...]] = _fixed_place
    instruct: Callable[[Instructions, int], Instructions] = _same_instructions
    adapt: Callable[[Instructions, Sequence[float]], Instructions] | None = None
    stays: tuple[str, ...] = ()
    keeps: frozenset[str] = frozenset()
    sets_all_numbers: bool = False
    renews_units: bool = False
    needs: frozenset[Trait] = frozenset()
    breaks: frozenset[Trait] = frozenset()


def moves_units(strategy: Strategy, tier: Tier, seed: int = 0) -> bool:
    """Return whether the next slice of a tier may have different units from its last one."""
    # The plan of any device and version shows the kind of a tier's plans.
    plan = strategy.plan(PlanRequest(tier, "", 0, seed)).plan
    return plan.kind != "static" or strategy.renews_units


@dataclass(frozen=True)
class Method(Generic[OptionsT]):
    """A row of the table of strategies, defined in the module of a method under its name.

    Attributes:
        build: builds the strategy. Raises PlanError, before anything is trained, if settings,
            model, tiers and optimizer are incompatible.
        settings: the type of ``[strategy.<name>]``, the method's own table; None for methods
            without one.
        alike: whether the method promises that every update counts alike, so that no bound applies
            to updates unless somebody asks for one.
        choice_remedy: remedy for a method whose devices choose their tiers: what to set if all of
            them always choose alike, from the system efficiencies that they measured; None for any
            other method.
    """

    build: Callable[[Basis[OptionsT]], Strategy]
    settings: type[OptionsT] | None = None
    alike: bool = False
    choice_remedy: Callable[[Sequence[float]], str] | None = None
