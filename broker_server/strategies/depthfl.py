"""DepthFL: sub-models of several depths, with an exit at every depth, whose exits teach each other.

Minjae Kim, Sangyoon Yu, Suhyun Kim, Soo-Mook Moon: "DepthFL: Depthwise Federated Learning for
Heterogeneous Clients", ICLR 2023, https://openreview.net/forum?id=pf8RIZTMU58. Specification
section 8.

A device trains the model up to its depth with all exits on the way, which
`trainer_export.losses.exits` describes. The server averages every entry over the devices that hold
it, so that the exits of shallow depths are merged from nearly all devices. It sends two numbers of
the loss with each task: how much the exits learn from each other, which grows over the first
rounds, and whether the exits below the last one learn the labels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from pydantic import Field

from broker_server.strategies import heterofl
from broker_server.strategies.feddyn import FedDynSettings, regularise
from broker_server.strategies.loss_numbers import instruct_numbers
from broker_server.strategies.strategy import Basis, Method, Strategy
from fleet_protocol.errors import PlanError
from fleet_protocol.frozen import FrozenModel
from models.tier import Tier

_STEEPNESS = 5.0  # of the ramp, as released


@dataclass(frozen=True)
class Baseline:
    """The method, or what the paper compares it with, as shares of its weights.

    Attributes:
        distillation: share of the weight of what exits learn from each other.
        inner: weight of the labels for the exits below the last.
    """

    distillation: float
    inner: float


BASELINES = MappingProxyType(
    {
        "depthfl": Baseline(distillation=1.0, inner=1.0),
        "without_distillation": Baseline(distillation=0.0, inner=1.0),
        "last_exit": Baseline(distillation=0.0, inner=0.0),
    }
)
"""Specification 8.4; ``last_exit`` is what DepthFL's code runs as InclusiveFL."""


class DepthFlSettings(FrozenModel):
    """``[strategy.depthfl]`` (specification 8.3).

    Attributes:
        distillation: final weight of the loss through which exits learn from each other.
        ramp_rounds: number of rounds over which the weight of the distillation loss grows. With 0,
            the weight has its final value from the first round.
        baseline: the method itself, or a baseline to which the paper compares it.
    """

    distillation: float = Field(default=1.0, ge=0, le=1e6)
    ramp_rounds: int = Field(default=300, ge=0)
    baseline: Literal["depthfl", "without_distillation", "last_exit"] = "depthfl"
    feddyn: FedDynSettings | None = None

    def numbers_after(self, closed_rounds: int) -> dict[str, float]:
        """Return the numbers of the loss after some rounds."""
        baseline = BASELINES[self.baseline]
        grown = ramp(closed_rounds, self.ramp_rounds)
        return {
            "distillation": self.distillation * baseline.distillation * grown,
            "inner": baseline.inner,
        }


def ramp(closed_rounds: int, rounds: int) -> float:
    """Return the share of a weight that grows over some rounds, in (0, 1].

    Samuli Laine, Timo Aila: "Temporal Ensembling for Semi-Supervised Learning", ICLR 2017,
    https://arxiv.org/abs/1610.02242: ``exp(-5 (1 - t)^2)`` with t the share of the rounds.
    """
    if closed_rounds >= rounds:
        return 1.0
    left = 1.0 - closed_rounds / rounds
    return math.exp(-_STEEPNESS * left * left)


def build(basis: Basis[DepthFlSettings]) -> Strategy:
    """Build the strategy from its settings.

    ``label_rule`` defaults to off: the paper averages every entry over all devices that hold it.

    Raises:
        PlanError: a plan is configured, no tier of full width is in use, or FedDyn cannot correct
            the merge.
    """
    if basis.plan != "static":
        raise PlanError(
            f"{basis.name} cuts by depth, so plan = {basis.plan!r} has no units to choose; remove"
            " it"
        )
    tiers = _tiers_of_full_width(basis)
    label_rule = basis.label_rule is True
    selective = heterofl.build(replace(basis, tiers=tiers, label_rule=label_rule))
    depthfl = replace(
        selective,
        name="depthfl",
        paper="https://openreview.net/forum?id=pf8RIZTMU58",
        instruct=instruct_numbers(basis.options.numbers_after),
        sets_all_numbers=True,
    )
    if basis.options.feddyn is None:
        return depthfl
    return regularise(depthfl, basis.options.feddyn, basis)


def _tiers_of_full_width(basis: Basis[DepthFlSettings]) -> Sequence[Tier]:
    tiers = [tier for tier in basis.tiers if tier.width == 1.0]
    if not tiers:
        raise PlanError(
            f"depthfl cuts {basis.layout.arch} by depth, but no tier of width 1 is in use; export"
            " it with --depths and without further widths"
        )
    return tuple(tiers)


STRATEGIES = {"depthfl": Method(build, DepthFlSettings)}
