"""FedRolex: keeps a window of the units of every layer, which moves each round.

So all units are trained equally often.

Samiul Alam, Luyang Liu, Ming Yan, Mi Zhang: "FedRolex: Model-Heterogeneous Federated Learning with
Rolling Sub-Model Extraction", NeurIPS 2022, https://arxiv.org/abs/2212.01548. Specification section
2. Its siblings differ only in the window: ``static`` is HeteroFL, ``random`` is Federated Dropout
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
from broker_server.strategies.traits import Trait
from broker_server.strategies.width_merge import LayerWeighting, layer_factor
from fleet_protocol.errors import PlanError
from fleet_protocol.frozen import FrozenModel
from models.axes import AxisKind
from models.draws import Direction, HeadRule, Window
from models.layout import Layout


class FedRolexSettings(FrozenModel):
    """``[strategy.fedrolex]``; the defaults are the paper's (specification 2).

    Attributes:
        window: whether the window moves (``rolling``), or stays in place (``static``).
        step: number of units by which the window moves in each round.
        direction: direction in which the window moves: ``up`` as in the paper, or ``down`` as in
            the released code.
        heads: whether a window stays inside its attention head (``preserving``), or not
            (``as_released``).
        weighting: weights of the devices in the paper's ablation: equal for all devices, or
            according to the width of a device's layer.
    """

    window: Literal["rolling", "static"] = "rolling"
    step: int = Field(default=1, ge=1)
    direction: Direction = "up"
    heads: HeadRule = "preserving"
    weighting: LayerWeighting = "avg"


class DropoutSettings(FrozenModel):
    """``[strategy.federated_dropout]``.

    Attributes:
        draw: whether units are drawn once for all layers of an axis (``tied``), which keeps
            residual branches together, or once for each layer (``per_layer``).
        drawn_for: whether units are drawn for each ``device``, as in the paper, or once per round
            for all devices of a ``tier``, so that a secure sum can add their updates.
    """

    draw: Literal["tied", "per_layer"] = "tied"
    drawn_for: Literal["device", "tier"] = "device"


def build(basis: Basis[FedRolexSettings]) -> Strategy:
    """Build HeteroFL, by default uniform and with the label rule, with windows that move.

    The global model may be wider than the widest device: the full tier need not be in use.

    Raises:
        PlanError: a plan is configured, or two kinds of weighting are, or a window would leave
            units untrained.
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
            f"{basis.name}: fedrolex.weighting = {options.weighting!r} weights by layers, "
            f"which excludes weighting = {basis.weighting!r}; remove one"
        )
    uniform = _with_window(replace(basis, average="mean"), window)
    factor = layer_factor(basis.layout, options.weighting)
    # The weights of this fold differ between tensors, so the result is not a mean of whole updates.
    merge = replace(uniform.merge, start=lambda: start(basis.layout, factor), deltas=False)
    return replace(uniform, merge=merge, breaks=uniform.breaks | {Trait.MEAN_OF_CHANGES})


def build_dropout(basis: Basis[DropoutSettings]) -> Strategy:
    """Build Federated Dropout, for which every device draws its own units in every round.

    Sebastian Caldas, Jakub Konecny, H. Brendan McMahan, Ameet Talwalkar: "Expanding the Reach of
    Federated Learning by Reducing Client Resource Requirements", 2018,
    https://arxiv.org/abs/1812.07210.

    Raises:
        PlanError: a plan is configured.
    """
    window = Window(kind="random", draw=basis.options.draw)
    for_tier = basis.options.drawn_for == "tier"
    strategy = _with_window(basis, window, tier_draws=for_tier)
    breaks = strategy.breaks - {Trait.SHARED_PLANS} if for_tier else strategy.breaks
    return replace(strategy, paper="https://arxiv.org/abs/1812.07210", breaks=breaks)


def _with_window(
    basis: Basis[FrozenModel | None],
    window: Window,
    *,
    tier_draws: bool = False,
) -> Strategy:
    """Build HeteroFL with another choice of units; `tier_draws` is that of `heterofl.plan_tier`."""
    if basis.plan != "static":
        raise PlanError(f"{basis.name} chooses its units itself; remove plan = {basis.plan!r}")
    for tier in basis.tiers:
        check_coverage(basis.layout, tier.width, window)
    selective = heterofl.build(basis)
    return replace(
        selective,
        name=basis.name,
        paper="https://arxiv.org/abs/2212.01548",
        plan=lambda request: plan_window(basis.layout, request, window, tier_draws=tier_draws),
        breaks=selective.breaks | heterofl.PLAN_BREAKS[window.kind],
    )


def plan_window(
    layout: Layout,
    request: PlanRequest,
    window: Window,
    *,
    tier_draws: bool = False,
) -> PlannedTier:
    """Plan one device's sub-model; arguments as in `heterofl.plan_tier`.

    The version of the request is the round index j of specification 2.1.

    Raises:
        PlanError: the model cannot have this tier, or a window with this step would never reach
            some units.
    """
    check_coverage(layout, request.tier.width, window)
    return heterofl.plan_tier(layout, request, window, tier_draws=tier_draws)


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
        PlanError: an axis would not be covered; the message names it.
    """
    if window.kind != "rolling":
        return
    for axis in layout.axes.values():
        if axis.kind is not AxisKind.WIDTH:
            continue
        # Released heads roll over the whole axis, but every head has a window, so gaps are those of
        # one group.
        size = axis.group_size
        kept = axis.kept(width) // axis.groups
        # Starts are the multiples of the common factor; a window at least as long leaves no gap
        # between them.
        factor = math.gcd(window.step, size)
        if kept < factor:
            raise PlanError(
                f"{layout.arch}: a window of {kept} of the {size} units of {axis.name} that "
                f"moves by {window.step} a round starts only at multiples of {factor} and "
                "never reaches the units between; choose a step without a common factor "
                f"with {size}, or of at most {kept}"
            )


STRATEGIES = {
    "fedrolex": Method(build, FedRolexSettings),
    "federated_dropout": Method(build_dropout, DropoutSettings),
}
