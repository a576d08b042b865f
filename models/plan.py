"""Plans: for one tier in one round, the kept blocks and the kept units of every axis.

`make_plan` draws a plan; `slice_weights` applies it to the global weights; `scatter` and `scatter_add` carry a
sub-model's tensors back. All three move runs of consecutive units with plain strided copies; `compile_plan`
finds those runs once for many updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from numpy.typing import NDArray

from fleet_protocol.errors import PlanError
from models.axes import Axis, AxisKind
from models.draws import Direction, HeadRule, Indices, random_units, rolling_units
from models.layout import STEM, Dim, Layout, Parameter, Statistic
from models.slicing import CompiledPlan, Region, Rows, Tensors, compile_tensor, tensor_regions
from models.tier import Tier

__all__ = [
    "CompiledPlan",
    "Plan",
    "PlanKind",
    "Region",
    "compile_plan",
    "make_plan",
    "regions",
    "scatter",
    "scatter_add",
    "slice_weights",
]

PlanKind = Literal["static", "rolling", "random"]
Draw = Literal["tied", "per_layer"]
_KINDS = ("static", "rolling", "random")


@dataclass(frozen=True, eq=False)
class Plan:
    """The part of a global model that one sub-model is.

    Attributes:
        tier: the sub-model's shape.
        kind: how the units were chosen.
        blocks: names of the kept blocks.
        indices: for each width axis its kept units in local order (int64, read-only).
        overrides: units of single dimensions, by (parameter name, dimension), that differ from `indices`;
            only plans drawn ``per_layer`` have them.
    """

    tier: Tier
    kind: PlanKind
    blocks: frozenset[str]
    indices: Mapping[str, Indices]
    overrides: Mapping[tuple[str, int], Indices] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for units in (*self.indices.values(), *self.overrides.values()):
            units.flags.writeable = False
        object.__setattr__(self, "indices", MappingProxyType(dict(self.indices)))
        object.__setattr__(self, "overrides", MappingProxyType(dict(self.overrides)))


def make_plan(
    layout: Layout,
    tier: Tier,
    kind: PlanKind = "static",
    *,
    round_index: int = 0,
    seed: int = 0,
    step: int = 1,
    direction: Direction = "up",
    draw: Draw = "tied",
    heads: HeadRule = "preserving",
) -> Plan:
    """Choose the units a tier keeps in a round.

    Args:
        layout: the global model.
        tier: the sub-model's shape.
        kind: ``static`` (leading units), ``rolling`` (a moving window) or ``random``.
        round_index: 0-based round, for rolling and random plans.
        seed: for random plans; give each device its own to draw for every client separately.
        step: units a rolling window moves in a round. All units are covered evenly when the step and the size
            of the axis have no common factor.
        direction: ``up`` as in the FedRolex paper, ``down`` as in its released code.
        draw: for random plans, ``tied`` draws once for each axis, so that residual sums line up;
            ``per_layer`` draws for each layer on its own, as the released baseline does.
        heads: for rolling plans, whether a window stays inside its head (``preserving``) or not.

    Returns:
        The plan; a function of the arguments alone.

    Raises:
        PlanError: if the model cannot have this tier, or an argument is out of range.
    """
    if kind not in _KINDS:
        raise PlanError(f"unknown kind of plan {kind!r}; choose one of {', '.join(_KINDS)}")
    for name, value, least in (("round_index", round_index, 0), ("seed", seed, 0), ("step", step, 1)):
        if value < least:
            raise PlanError(f"a plan needs {name} >= {least}, not {value}")

    def units(axis: Axis, label: str) -> Indices:
        if kind == "random":
            return random_units(axis, tier.width, seed=seed, round_index=round_index, label=label)
        shift = 0 if kind == "static" else step * round_index
        return rolling_units(axis, tier.width, shift=shift, direction=direction, heads=heads)

    blocks = layout.blocks(tier)
    indices = {name: units(axis, name) for name, axis in layout.axes.items() if axis.kind is AxisKind.WIDTH}
    overrides: dict[tuple[str, int], Indices] = {}
    if kind == "random" and draw == "per_layer":
        # The chain of METHODS "Shared notation": each layer draws its outputs; its inputs are the outputs that
        # were drawn last on the same axis.
        current = dict(indices)
        for parameter in layout.kept(tier):
            output = _output_dim(layout, parameter)
            for position, dim in enumerate(parameter.dims):
                if dim.axis not in current:
                    continue
                if position == output:
                    current[dim.axis] = units(layout.axes[dim.axis], parameter.name)
                overrides[parameter.name, position] = current[dim.axis]
    return Plan(tier, kind, blocks, indices, overrides)


def _output_dim(layout: Layout, parameter: Parameter) -> int | None:
    """Find the dimension along which a layer draws: the first, or the second of an embedding table."""
    widths = [
        position
        for position, dim in enumerate(parameter.dims)
        if layout.axes[dim.axis].kind is AxisKind.WIDTH and len(parameter.dims) > 1
    ]
    if widths and (widths[0] == 0 or parameter.block == STEM):
        return widths[0]
    return None


def compile_plan(layout: Layout, plan: Plan) -> CompiledPlan:
    """Find once what a plan moves, for use on many sets of weights.

    Args:
        layout: the global model.
        plan: a plan of one of its tiers.

    Returns:
        The regions of every kept parameter, then of every kept statistic.
    """
    tensors = [
        compile_tensor(layout, item.name, item.dims, _units(layout, plan, item))
        for item in layout.parameters
        if item.block in plan.blocks
    ]
    required = frozenset(tensor.name for tensor in tensors)
    tensors += [
        compile_tensor(layout, name, item.dims, _units(layout, plan, item))
        for item in layout.statistics
        if item.block in plan.blocks
        for name in item.tensors
    ]
    return CompiledPlan(
        title=f"{layout.arch} {plan.tier.id}",
        tensors=MappingProxyType({tensor.name: tensor for tensor in tensors}),
        required=required,
        label_axes=frozenset(layout.label_axes),
    )


def _units(layout: Layout, plan: Plan, item: Parameter | Statistic) -> list[Indices | None]:
    """List the kept units of each dimension; None where all are kept in order."""
    owner = item.name if isinstance(item, Parameter) else f"{item.name}.weight"

    def of(position: int, dim: Dim) -> Indices | None:
        if layout.axes[dim.axis].kind is not AxisKind.WIDTH:
            return None
        return plan.overrides.get((owner, position), plan.indices[dim.axis])

    return [of(position, dim) for position, dim in enumerate(item.dims)]


def regions(layout: Layout, plan: Plan, parameter: Parameter) -> tuple[Region, ...]:
    """List the boxes of a parameter that a plan keeps.

    Args:
        layout: the global model.
        plan: the plan.
        parameter: one of the layout's parameters.

    Returns:
        Pairs of an index into the global tensor and the index of the same entries in the local one. Both are
        tuples of slices, unless the kept units are so scattered that the boxes would be tiny: then there is one
        pair of open meshes (`numpy.ix_`). No entry occurs twice.
    """
    return tensor_regions(compile_tensor(layout, parameter.name, parameter.dims, _units(layout, plan, parameter)))


def slice_weights(
    layout: Layout, plan: Plan | CompiledPlan, weights: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Cut a sub-model's tensors out of the global ones.

    Args:
        layout: the global model.
        plan: what to keep.
        weights: global tensors by name: every kept parameter, and statistics where there are any.

    Returns:
        Contiguous copies of the same dtype, parameters in registration order, then the statistics given.

    Raises:
        PlanError: if a kept parameter is missing or has another shape.
    """
    return _compiled(layout, plan).slice(weights)


def scatter(
    layout: Layout,
    plan: Plan | CompiledPlan,
    sub: Mapping[str, NDArray[Any]],
    onto: Mapping[str, NDArray[Any]],
) -> dict[str, NDArray[Any]]:
    """Write a sub-model's tensors back into copies of global ones; the inverse of `slice_weights`.

    Args:
        layout: the global model.
        plan: what the sub-model is.
        sub: its tensors.
        onto: global tensors; those that the plan does not touch are copied as they are.

    Returns:
        New tensors under the names of `onto`.

    Raises:
        PlanError: if a tensor is missing, unknown or has another shape.
    """
    return _compiled(layout, plan).scatter(sub, onto)


def scatter_add(
    layout: Layout,
    plan: Plan | CompiledPlan,
    target: Tensors,
    update: Mapping[str, NDArray[Any]],
    rows: Rows | None = None,
    *,
    weight: float = 1.0,
) -> None:
    """Add a sub-model's tensors into running sums of the global shape, in place.

    Args:
        layout: the global model.
        plan: what the sub-model is; a `CompiledPlan` where many updates share it.
        target: sums by name, of the global shapes.
        update: the sub-model's tensors.
        rows: for label axes, the rows to take from this update (the label rule); all rows of an axis that is
            not named.
        weight: factor on the update.

    Raises:
        PlanError: if a tensor is missing, unknown or has another shape, or a row does not exist; then nothing
            has been added.
    """
    _compiled(layout, plan).scatter_add(target, update, rows, weight=weight)


def _compiled(layout: Layout, plan: Plan | CompiledPlan) -> CompiledPlan:
    return plan if isinstance(plan, CompiledPlan) else compile_plan(layout, plan)
