"""FedRolex: keep a window of the units of every layer that moves each round.

So all units get trained equally often.

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
from broker_server.strategies.width_merge import LayerWeighting, layer_factor
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
    weighting: LayerWeighting = "avg"


class DropoutSettings(FrozenModel):
    """``[strategy.federated_dropout]``.

    Attributes:
        draw: one draw for all layers of an axis, which keeps residual branches together, or one for
            each layer.
    """

    draw: Literal["tied", "per_layer"] = "tied"


def build(basis: Basis[FedRolexSettings]) -> Strategy:
    """Build HeteroFL, by default uniform and with the label rule, with windows that move.

    The global model may be wider than the widest device: the full tier need not be in use.

    Raises:
        PlanError: a plan is configured, or two ways of weighting are, or a window would leave units
            untrained.
    """
    options = basis.options
    window = Window(
        options.window,
        options.step,
        options.direction,
        options.heads,
    )
    if options.weighting == "avg":
        return _with_window(basis, window)
    if basis.weighting == "samples":
        raise PlanError(
            f"{basis.name}: fedrolex.weighting = {options.weighting!r} weights by layers, so"
            f" weighting = {basis.weighting!r} has no place; remove one"
        )
    uniform = _with_window(replace(basis, average="mean"), window)
    factor = layer_factor(basis.layout, options.weighting)
    # The weights of this fold differ between tensors, so no mean of whole updates is left.
    merge = replace(uniform.merge, start=lambda: start(basis.layout, factor), deltas=False)
    return replace(uniform, merge=merge)


def build_dropout(basis: Basis[DropoutSettings]) -> Strategy:
    """Build Federated Dropout, for which every device draws its own units in every round.

    Sebastian Caldas, Jakub Konecny, H. Brendan McMahan, Ameet Talwalkar: "Expanding the Reach of
    Federated Learning by Reducing Client Resource Requirements", 2018,
    https://arxiv.org/abs/1812.07210.

    Raises:
        PlanError: a plan is configured.
    """
    window = Window(kind="random", draw=basis.options.draw)
    return replace(_with_window(basis, window), paper="https://arxiv.org/abs/1812.07210")


def _with_window(basis: Basis[FrozenModel | None], window: Window) -> Strategy:
    """Build HeteroFL with another choice of units."""
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


def plan_window(
    layout: Layout,
    request: PlanRequest,
    window: Window,
) -> PlannedTier:
    """Plan one device's sub-model.

    The version of the request is the round index j of specification 2.1.

    Raises:
        PlanError: the model cannot have this tier, or a window of this step would never reach some
            units.
    """
    check_coverage(layout, request.tier.width, window)
    return heterofl.plan_tier(layout, request, window)


def check_coverage(
    layout: Layout,
    width: float,
    window: Window,
) -> None:
    """Refuse a rolling window that would leave some units untrained for ever.

    Coverage is guaranteed when the step is no longer than the window, or has no factor in common
    with the size of the axis (specification 2.1).

    Args:
        layout: the global model.
        width: share of the global width that the sub-model keeps.
        window: the window.

    Raises:
        PlanError: an axis would not be covered, which the error names.
    """
    if window.kind != "rolling":
        return
    for axis in layout.axes.values():
        if axis.kind is not AxisKind.WIDTH:
            continue
        # Released heads roll over the whole axis, but every head has a window, so gaps are those of
        # one group.
        size = axis.group_size
        kept = kept_units(size, width)
        # Starts are the multiples of the common factor; a window at least as long leaves no gap
        # between them.
        factor = math.gcd(window.step, size)
        if kept < factor:
            raise PlanError(
                f"{layout.arch}: a window of {kept} of the {size} units of {axis.name} that moves"
                f" by {window.step} a round starts only at multiples of {factor} and never reaches"
                " the units between; choose a step without common factor with"
                f" {size}, or of at most {kept}"
            )


STRATEGIES = {
    "fedrolex": Method(build, FedRolexSettings),
    "federated_dropout": Method(build_dropout, DropoutSettings),
}
