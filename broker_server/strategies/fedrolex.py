"""FedRolex: the kept units of every layer are a window that moves each round, so all get trained equally often.

Samiul Alam, Luyang Liu, Ming Yan, Mi Zhang: "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model
Extraction", NeurIPS 2022, https://arxiv.org/abs/2212.01548. METHODS section 2. Its siblings differ in the window
alone: ``static`` is HeteroFL, ``random`` is Federated Dropout (Caldas et al., 2018), for which every device draws its
own units.

The merge is HeteroFL's. The paper's ablation weights the devices that hold an entry by the width of their layer
(``width``), by how often the entry was updated before (``updates``), or by the product. The count of past updates is
the same for every device that holds the entry, so it cancels: ``updates`` is the plain average and ``updates_width``
is ``width``. (The released code counts while it adds, which makes later devices heavier; that is not copied.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from broker_server.config import StrategyConfig
from broker_server.strategies import heterofl
from broker_server.strategies.strategy import Contribution, PlannedTier, PlanRequest, Strategy
from fleet_protocol.errors import ConfigError, PlanError
from models.axes import AxisKind, kept_units
from models.draws import Direction, HeadRule
from models.layout import Layout, Parameter
from models.plan import CompiledPlan, make_plan
from models.slicing import Tensors
from models.tier import Tier

__all__ = [
    "Weighting",
    "WidthMerge",
    "Window",
    "build",
    "build_dropout",
    "check_coverage",
    "expected_rounds_to_cover",
    "finish_width",
    "fold_width",
    "plan_window",
    "probability_untouched",
    "start_width",
]

Weighting = Literal["avg", "width", "updates", "updates_width"]
_BY_WIDTH = frozenset({"width", "updates_width"})
_WEIGHTINGS = ("avg", "width", "updates", "updates_width")


@dataclass(frozen=True)
class Window:
    """How the kept units are chosen; the defaults are the paper's.

    Attributes:
        kind: ``rolling``, or ``static`` or ``random`` for the siblings.
        step: units a rolling window moves in a round.
        direction: ``up`` as in the paper, ``down`` as in the released code.
        heads: whether a rolling window stays inside its attention head.
        draw: for random plans, one draw for each axis (``tied``) or for each layer (``per_layer``, as released).
    """

    kind: Literal["rolling", "static", "random"] = "rolling"
    step: int = 1
    direction: Direction = "up"
    heads: HeadRule = "preserving"
    draw: Literal["tied", "per_layer"] = "tied"

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ConfigError(f"a rolling window moves by at least 1 unit a round, not {self.step}")


def build(config: StrategyConfig, window: Window | None = None) -> Strategy:
    """The strategy as configured: HeteroFL's merge, and windows that move.

    The global model may be wider than the widest device: nothing asks for the full tier.

    Args:
        config: ``fedrolex``; ``weighting`` defaults to uniform, ``label_rule`` to on.
        window: how units are chosen, instead of what ``fedrolex`` says.

    Raises:
        PlanError: a plan is configured, or two ways of weighting are.
    """
    if config.plan != "static":
        raise PlanError(f"{config.name} chooses its units itself; remove plan = {config.plan!r}")
    keys = config.fedrolex
    chosen = window or Window(keys.window, keys.step, keys.direction, keys.heads)

    def tiers(layout: Layout, offered: Sequence[Tier]) -> tuple[Tier, ...]:
        if chosen.kind == "rolling":
            for tier in offered:
                check_coverage(layout, tier.width, chosen)
        return tuple(offered)

    built = replace(
        heterofl.build(config),
        name=config.name,
        paper="https://arxiv.org/abs/2212.01548",
        tiers=tiers,
        plan=lambda request: plan_window(request, chosen),
    )
    if keys.weighting == "avg":
        return built
    if config.weighting is not None:
        raise PlanError(
            f"{config.name}: fedrolex.weighting = {keys.weighting!r} weights by layers, so weighting ="
            f" {config.weighting!r} has no place; remove one"
        )
    by_label = config.label_rule is not False

    def fold_layers(state: WidthMerge, update: Contribution) -> None:
        fold_width(state, update.plan, update.weights, labels=update.metrics.labels if by_label else None)

    return replace(
        built,
        start=lambda layout: start_width(layout, keys.weighting),
        fold=fold_layers,
        finish=finish_width,
    )


def build_dropout(config: StrategyConfig) -> Strategy:
    """Federated Dropout: every device draws its own units in every round.

    Sebastian Caldas, Jakub Konecny, H. Brendan McMahan, Ameet Talwalkar: "Expanding the Reach of Federated Learning by
    Reducing Client Resource Requirements", 2018, https://arxiv.org/abs/1812.07210.

    Args:
        config: ``federated_dropout``; the rest as for FedRolex.

    Raises:
        PlanError: a plan is configured.
    """
    window = Window(kind="random", draw=config.federated_dropout.draw)
    return replace(build(config, window), paper="https://arxiv.org/abs/1812.07210")


def plan_window(request: PlanRequest, window: Window) -> PlannedTier:
    """Plan one device's sub-model.

    Args:
        request: for whom; its version is the round index j of METHODS 2.1.
        window: how to choose the units.

    Returns:
        The plan. All devices of a tier share it, except that every device has a random one of its own.

    Raises:
        PlanError: the model cannot have this tier, or a window of this step would never reach some units.
    """
    own = window.kind == "random"
    if window.kind == "rolling":
        check_coverage(request.layout, request.tier.width, window)
    plan = make_plan(
        request.layout,
        request.tier,
        window.kind,
        round_index=request.version,
        seed=heterofl.seed_of(request.seed, request.device) if own else request.seed,
        step=window.step,
        direction=window.direction,
        draw=window.draw,
        heads=window.heads,
    )
    return PlannedTier(f"{request.tier.id}/{request.device}" if own else request.tier.id, plan)


def check_coverage(layout: Layout, width: float, window: Window) -> None:
    """Refuse a window that would leave some units untrained for ever.

    Coverage is guaranteed when the step is no longer than the window, or has no factor in common with the size of
    the axis (METHODS 2.1).

    Args:
        layout: the global model.
        width: share of the global width.
        window: a rolling window.

    Raises:
        PlanError: an axis would not be covered; the message names it.
    """
    for axis in layout.axes.values():
        if axis.kind is not AxisKind.WIDTH:
            continue
        # Released heads roll over the whole axis, but every head has a window, so gaps are those of one group.
        size = axis.group_size
        kept = kept_units(axis.group_size, width)
        # Starts are the multiples of the common factor; a window at least as long leaves no gap between them.
        factor = math.gcd(window.step, size)
        if kept < factor:
            raise PlanError(
                f"{layout.arch}: a window of {kept} of the {size} units of {axis.name} that moves by {window.step} a"
                f" round starts only at multiples of {factor} and never reaches the units between; choose a step"
                f" without common factor with {size}, or of at most {kept}"
            )


@dataclass
class WidthMerge:
    """The running state of a merge whose weights differ from layer to layer.

    It keeps two arrays of the size of the model, twice what `broker_server.merge` keeps: it serves the ablation.

    Attributes:
        layout: the global model.
        weighting: which ablation.
        sums: weighted sums by name.
        totals: total weights by name, of the same shapes.
    """

    layout: Layout
    weighting: Weighting
    sums: dict[str, NDArray[Any]]
    totals: dict[str, NDArray[Any]]


def start_width(layout: Layout, weighting: Weighting) -> WidthMerge:
    """An empty merge.

    Args:
        layout: the global model.
        weighting: which ablation.

    Raises:
        ConfigError: there is no such weighting.
    """
    if weighting not in _WEIGHTINGS:
        raise ConfigError(f"unknown weighting {weighting!r}; choose one of {', '.join(_WEIGHTINGS)}")
    zeros = [{item.name: np.zeros(item.shape, np.float32) for item in layout.parameters} for _ in range(2)]
    return WidthMerge(layout, weighting, zeros[0], zeros[1])


def fold_width(state: WidthMerge, plan: CompiledPlan, update: Tensors, *, labels: Iterable[int] | None = None) -> None:
    """Add one update.

    Args:
        state: changed in place.
        plan: what the update holds.
        update: the sub-model's parameters by name, float32.
        labels: labels in the device's data; None takes every row of the label axes.

    Raises:
        PlanError: the update is not one of this plan; nothing was added.
    """
    rows = None
    if labels is not None:
        held = np.unique(np.fromiter(labels, np.int64))
        rows = {name: held for name in state.layout.label_axes if state.layout.axes[name].size == state.layout.classes}
    factors = {
        item.name: np.float32(_factor(state, item, plan))
        for item in state.layout.parameters
        if item.name in plan.tensors
    }
    plan.scatter_add(state.sums, {name: update[name] * factor for name, factor in factors.items()}, rows)
    amounts = {name: np.full(plan.tensors[name].local_shape, factor) for name, factor in factors.items()}
    plan.scatter_add(state.totals, amounts, rows)


def _factor(state: WidthMerge, item: Parameter, plan: CompiledPlan) -> float:
    """n_out of the device's layer: its rows, or the columns of an embedding table."""
    if state.weighting not in _BY_WIDTH or not item.shape:
        return 1.0
    shape, axes = plan.tensors[item.name].local_shape, state.layout.axes
    kinds = [axes[dim.axis].kind for dim in item.dims]
    table = kinds[0] is AxisKind.FIXED and item.dims[0].axis not in state.layout.label_axes
    if table and AxisKind.WIDTH in kinds:
        return float(shape[kinds.index(AxisKind.WIDTH)])
    return float(shape[0])


def finish_width(state: WidthMerge, old: Tensors) -> dict[str, NDArray[Any]]:
    """Divide the sums.

    Args:
        state: a merge; its arrays are reused.
        old: the weights the round started from; entries that no update covers keep their bits.

    Returns:
        The new weights, in layout order.
    """
    for name, total in state.totals.items():
        bare = total == 0
        total[bare] = 1
        np.divide(state.sums[name], total, out=state.sums[name])
        np.copyto(state.sums[name], old[name], where=bare)
    return state.sums


def expected_rounds_to_cover(size: int, kept: int) -> float:
    """Mean number of rounds until random draws have kept every unit of an axis at least once.

    With T the round of full coverage, P(T > t) is the probability that some unit was missed t times. By inclusion and
    exclusion, and summing over t, ``E[T] = sum_i (-1)^(i+1) C(K, i) / (1 - C(K-i, n) / C(K, n))``. The terms alternate
    and are large, so they are added as fractions.

    Args:
        size: units of the axis, K.
        kept: units of a draw, n, in 1..K.

    Returns:
        The mean, in rounds. A window that rolls by 1 needs exactly ``K - n + 1``.

    Raises:
        PlanError: the numbers are out of range.
    """
    _require_kept(size, kept)
    draws = math.comb(size, kept)
    terms = (
        Fraction((-1) ** (missed + 1) * math.comb(size, missed) * draws, draws - math.comb(size - missed, kept))
        for missed in range(1, size + 1)
    )
    return float(sum(terms, Fraction(0)))


def probability_untouched(size: int, kept: int, rounds: int) -> float:
    """Probability that random draws have not kept a given unit in so many rounds.

    Args:
        size: units of the axis, K.
        kept: units of a draw, n, in 1..K.
        rounds: R.

    Returns:
        ``(1 - n / K) ** R``.

    Raises:
        PlanError: the numbers are out of range.
    """
    _require_kept(size, kept)
    return (1 - kept / size) ** rounds


def _require_kept(size: int, kept: int) -> None:
    if not 1 <= kept <= size:
        raise PlanError(f"{kept} of {size} units cannot be drawn")
