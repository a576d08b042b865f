"""What a strategy is: how to cut, how to merge, how to step the server's optimizer. One file per paper builds one.

A strategy is a frozen record of functions over explicit state; there is no base class. The state that a server
optimizer carries from round to round (moments, per-depth copies) is a mapping of arrays that is stored beside every
global version, so that a server that is killed goes on with it.

Most methods set a few fields and take `broker_server.strategies.heterofl` for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker_server.config import StrategyConfig
from broker_server.server_optimizer import OptimizerSettings, server_step
from fleet_protocol.messages import TaskMetrics, TrainSettings
from models.layout import Layout
from models.plan import CompiledPlan, Plan
from models.slicing import Tensors
from models.tier import Tier

__all__ = [
    "Builder",
    "Contribution",
    "PlanRequest",
    "PlannedTier",
    "ServerState",
    "Strategy",
    "keep_settings",
    "keep_state",
    "largest_only",
    "optimize",
    "same_for_every_run",
    "slice_of_global",
]

ServerState = Mapping[str, NDArray[Any]]
"""Arrays a server optimizer carries between rounds; empty for most strategies."""


@dataclass(frozen=True)
class PlanRequest:
    """For whom a plan is wanted.

    Attributes:
        layout: the global model.
        tier: the sub-model's shape.
        device: id.
        version: closed rounds so far, which is the round index of the papers (from 0).
        seed: of the run.
    """

    layout: Layout
    tier: Tier
    device: str
    version: int
    seed: int


@dataclass(frozen=True)
class PlannedTier:
    """A plan with a name; devices whose plans share a name share one blob of weights.

    Attributes:
        key: the name, unique within a round.
        plan: the plan.
    """

    key: str
    plan: Plan


@dataclass(frozen=True)
class Contribution:
    """A checked update on its way into the accumulator.

    Attributes:
        device: id.
        key: name of its plan.
        plan: what it holds.
        weights: its tensors, views of a mapped file.
        metrics: what the device measured.
    """

    device: str
    key: str
    plan: CompiledPlan
    weights: Tensors
    metrics: TaskMetrics


Weights = dict[str, NDArray[np.float32]]
Step = Callable[[Tensors, Weights, ServerState], tuple[Weights, ServerState]]


def keep_state(_old: Tensors, merged: Weights, state: ServerState) -> tuple[Weights, ServerState]:
    """The server step of methods without a server optimizer: the merged weights are the new ones."""
    return merged, state


def slice_of_global(
    plan: CompiledPlan, _request: PlanRequest, weights: Tensors, _state: ServerState
) -> Mapping[str, NDArray[Any]]:
    """What most methods send: the plan's part of the global weights."""
    return plan.slice(weights)


def largest_only(_layout: Layout, _tiers: Sequence[Tier], largest: Tier) -> tuple[Tier, ...]:
    """What most methods offer: the largest tier that the device can train."""
    return (largest,)


def keep_settings(settings: TrainSettings, _layout: Layout, _closed_rounds: int) -> TrainSettings:
    """What most methods ask of a device's training: nothing beyond the configuration."""
    return settings


def same_for_every_run(strategy: Strategy, _layout: Layout, _tiers: Sequence[Tier]) -> Strategy:
    """Most methods need not know the model or the tiers beforehand."""
    return strategy


def optimize(strategy: Strategy, settings: OptimizerSettings) -> Strategy:
    """Put a server optimizer behind a strategy's merge.

    Args:
        strategy: one without a server step of its own.
        settings: which optimizer.
    """
    return replace(strategy, step=server_step(settings))


@dataclass(frozen=True)
class Strategy:
    """How one method plans, merges and steps.

    Attributes:
        name: as in the configuration.
        paper: where it comes from.
        tiers: of the exported tiers, those it can use; raises PlanError if there is none.
        plan: the plan for one device; a pure function, so that a killed server makes the same one again.
        start: an empty accumulator, of any type that `fold` and `finish` know.
        fold: add one contribution; called in ascending order of the devices' ids.
        finish: the merged weights, from the accumulator and the weights the round started from. They are for `step`
            alone, which may know more of them than the parameters of the model.
        step: old weights, merged weights and state to new weights and state.
        begin: the state of a run before its first round, from layout, initial weights and the initial weights of the
            heads that tiers in use have of their own; None for a method that has no place for such heads.
        send: the tensors that a device is sent, from plan, request, global weights and state.
        offer: the tiers that a device is offered, the one it takes by default first, from those in use and the
            largest it can train.
        train: what it changes in the settings of the devices' training, given the rounds closed so far.
        for_run: itself for one model and the tiers in use; raises PlanError, before anything is trained, where they
            do not go together.
        optimized: itself with the configured server optimizer; raises PlanError where it has no place for one.
    """

    name: str
    paper: str
    tiers: Callable[[Layout, Sequence[Tier]], tuple[Tier, ...]]
    plan: Callable[[PlanRequest], PlannedTier]
    start: Callable[[Layout], Any]
    fold: Callable[[Any, Contribution], None]
    finish: Callable[[Any, Tensors], Weights]
    step: Step = keep_state
    begin: Callable[[Layout, Tensors, Mapping[Tier, Tensors]], ServerState] | None = None
    send: Callable[[CompiledPlan, PlanRequest, Tensors, ServerState], Tensors] = slice_of_global
    offer: Callable[[Layout, Sequence[Tier], Tier], tuple[Tier, ...]] = largest_only
    train: Callable[[TrainSettings, Layout, int], TrainSettings] = keep_settings
    for_run: Callable[[Strategy, Layout, Sequence[Tier]], Strategy] = same_for_every_run
    optimized: Callable[[Strategy, OptimizerSettings], Strategy] = optimize


Builder = Callable[[StrategyConfig], Strategy]
