"""What a strategy is: how to cut, how to merge, how to step the server's optimizer. One file per paper builds one.

A strategy is a frozen record of functions over explicit state; there is no base class. The state that a server
optimizer carries from round to round (moments, per-depth copies) is a mapping of arrays that is stored beside every
global version, so that a server that is killed goes on with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker_server.config import StrategyConfig
from broker_server.merge import Accumulator
from fleet_protocol.messages import TaskMetrics
from models.layout import Layout
from models.plan import CompiledPlan, Plan
from models.slicing import Tensors
from models.tier import Tier

__all__ = ["Builder", "Contribution", "PlanRequest", "PlannedTier", "ServerState", "Strategy", "keep_state"]

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


@dataclass(frozen=True)
class Strategy:
    """How one method plans, merges and steps.

    Attributes:
        name: as in the configuration.
        paper: where it comes from.
        tiers: of the exported tiers, those it can use; raises PlanError if there is none.
        plan: the plan for one device; a pure function, so that a killed server makes the same one again.
        start: an empty accumulator.
        fold: add one contribution; called in ascending order of the devices' ids.
        finish: the merged weights, from the accumulator and the weights the round started from.
        step: the server optimizer: old weights, merged weights and state to new weights and state.
        needs_statistics: devices must send more than weights (reserved for methods that ask for gradients).
    """

    name: str
    paper: str
    tiers: Callable[[Layout, Sequence[Tier]], tuple[Tier, ...]]
    plan: Callable[[PlanRequest], PlannedTier]
    start: Callable[[Layout], Accumulator]
    fold: Callable[[Accumulator, Contribution], None]
    finish: Callable[[Accumulator, Tensors], dict[str, NDArray[np.float32]]]
    step: Callable[
        [Tensors, dict[str, NDArray[np.float32]], ServerState],
        tuple[dict[str, NDArray[np.float32]], ServerState],
    ]
    needs_statistics: bool = False


Builder = Callable[[StrategyConfig], Strategy]


def keep_state(
    _old: Tensors, merged: dict[str, NDArray[np.float32]], state: ServerState
) -> tuple[dict[str, NDArray[np.float32]], ServerState]:
    """The server step of methods without a server optimizer: the merged weights are the new ones."""
    return merged, state
