"""FedRolex: the kept units of every layer are a window that moves each round, so all get trained
equally often.

Samiul Alam, Luyang Liu, Ming Yan, Mi Zhang: "FedRolex: Model-Heterogeneous Federated Learning with
Rolling Sub-Model Extraction", NeurIPS 2022, https://arxiv.org/abs/2212.01548. Specification section
2. Its siblings differ in the window alone: ``static`` is HeteroFL, ``random`` is Federated Dropout
(Caldas et al., 2018), for which every device draws its own units.

The merge is HeteroFL's; the paper's ablation of it is `broker_server.strategies.width_merge`.
"""

import math
from dataclasses import replace
from typing import Literal

from pydantic import Field

from broker_server.strategies import heterofl
from broker_server.strategies.accumulator import start
from broker_server.strategies.strategy import (
    Basis,
    Method,
    PlannedTier,
    PlanRequest,
    Strategy,
)
from broker_server.strategies.width_merge import Weighting, layer_factor
from fleet_protocol.errors import PlanError
from fleet_protocol.frozen import FrozenModel
from models.axes import AxisKind, kept_units
from models.draws import Direction, HeadRule, Window
from models.layout import Layout


class FedRolexSettings(FrozenModel):
    """``[strategy.fedrolex]``; the defaults are the paper's (specification 2).

    Attributes:
        window: ``rolling``, or ``static`` for the sibling that stays where it is.
        step: units a window moves in a round.
        direction: ``up`` as in the paper, ``down`` as in the released code.
        heads: whether a window stays inside its attention head.
        weighting: the paper's ablation: every device alike, or by the width of its layer.
    """

    window: Literal["rolling", "static"] = "rolling"
    step: int = Field(default=1, ge=1)
    direction: Direction = "up"
    heads: HeadRule = "preserving"
    weighting: Weighting = "avg"


class DropoutSettings(FrozenModel):
    """``[strategy.federated_dropout]``.

    Attributes:
        draw: one draw for all layers of an axis, which keeps residual branches together, or one for
            each layer.
    """

    draw: Literal["tied", "per_layer"] = "tied"


def build(basis: Basis[FedRolexSettings]) -> Strategy:
    """The strategy as configured: HeteroFL's merge, by default uniform and with the label rule, and
    windows that move.

    The global model may be wider than the widest device: nothing asks for the full tier.

    Raises:
        PlanError: a plan is configured, or two ways of weighting are, or a window would leave units
            untrained.
    """
    keys = basis.options
    window = Window(keys.window, keys.step, keys.direction, keys.heads)
    if keys.weighting == "avg":
        return _windowed(basis, window)
    if basis.weighting == "samples":
        raise PlanError(
            f"{basis.name}: fedrolex.weighting = {keys.weighting!r} weights by layers, so weighting ="
            f" {basis.weighting!r} has no place; remove one"
        )
    built = _windowed(replace(basis, average="mean"), window)
    factor = layer_factor(basis.layout, keys.weighting)
    return replace(
        built,
        merge=replace(built.merge, start=lambda: start(basis.layout, factor), deltas=False),
    )


def build_dropout(basis: Basis[DropoutSettings]) -> Strategy:
    """Federated Dropout: every device draws its own units in every round.

    The rest is as for FedRolex.

    Sebastian Caldas, Jakub Konecny, H. Brendan McMahan, Ameet Talwalkar: "Expanding the Reach of
    Federated Learning by Reducing Client Resource Requirements", 2018,
    https://arxiv.org/abs/1812.07210. A configured plan is a PlanError.
    """
    built = _windowed(basis, Window(kind="random", draw=basis.options.draw))
    return replace(built, paper="https://arxiv.org/abs/1812.07210")


def _windowed(basis: Basis[FrozenModel | None], window: Window) -> Strategy:
    """HeteroFL with another choice of units."""
    if basis.plan != "static":
        raise PlanError(f"{basis.name} chooses its units itself; remove plan = {basis.plan!r}")
    for tier in basis.tiers:
        check_coverage(basis.layout, tier.width, window)
    return replace(
        heterofl.build(basis),
        name=basis.name,
        paper="https://arxiv.org/abs/2212.01548",
        plan=lambda request: plan_window(basis.layout, request, window),
    )


def plan_window(layout: Layout, request: PlanRequest, window: Window) -> PlannedTier:
    """Plan one device's sub-model.

    The version of the request is the round index j of specification 2.1.

    Raises:
        PlanError: the model cannot have this tier, or a window of this step would never reach some
            units.
    """
    check_coverage(layout, request.tier.width, window)
    return heterofl.plan_tier(layout, request, window)


def check_coverage(layout: Layout, width: float, window: Window) -> None:
    """Refuse a rolling window that would leave some units untrained for ever, at a share of the
    global width.

    Coverage is guaranteed when the step is no longer than the window, or has no factor in common
    with the size of the axis (specification 2.1). A PlanError names an axis that would not be
    covered.
    """
    if window.kind != "rolling":
        return
    for axis in layout.axes.values():
        if axis.kind is not AxisKind.WIDTH:
            continue
        # Released heads roll over the whole axis, but every head has a window, so gaps are those of
        # one group.
        size = axis.group_size
        kept = kept_units(axis.group_size, width)
        # Starts are the multiples of the common factor; a window at least as long leaves no gap
        # between them.
        factor = math.gcd(window.step, size)
        if kept < factor:
            raise PlanError(
                f"{layout.arch}: a window of {kept} of the {size} units of {axis.name} that moves by {window.step} a"
                f" round starts only at multiples of {factor} and never reaches the units between; choose a step"
                f" without common factor with {size}, or of at most {kept}"
            )


STRATEGIES = {
    "fedrolex": Method(build, FedRolexSettings),
    "federated_dropout": Method(build_dropout, DropoutSettings),
}
