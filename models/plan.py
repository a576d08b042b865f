"""Plans: for one tier in one round, the kept blocks and the kept units of every axis.

`make_plan` draws a plan; `compile_plan` finds the runs of consecutive units that it keeps, once for
many updates, which plain strided copies then move out of the global weights: `slice_weights`.
Merging adds them back by the same runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from numpy.typing import NDArray

from fleet_protocol.errors import PlanError
from models.axes import Axis, AxisKind
from models.draws import Indices, PlanKind, Window, random_units, rolling_units
from models.layout import STEM, Layout, Parameter, Statistic
from models.slicing import CompiledPlan, compile_tensor
from models.tier import Tier


@dataclass(frozen=True, eq=False)
class Plan:
    """The part of a global model that one sub-model is."""

    tier: Tier
    kind: PlanKind
    blocks: frozenset[str]  # names of the kept blocks
    indices: Mapping[
        str, Indices
    ]  # for each width axis its kept units in local order (int64, read-only)
    # units of single dimensions, by (parameter name, dimension, axis), that differ from `indices`;
    # only plans drawn ``per_layer`` have them
    overrides: Mapping[tuple[str, int, str], Indices] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for units in (*self.indices.values(), *self.overrides.values()):
            units.flags.writeable = False
        object.__setattr__(self, "indices", MappingProxyType(dict(self.indices)))
        object.__setattr__(self, "overrides", MappingProxyType(dict(self.overrides)))


def make_plan(
    layout: Layout,
    tier: Tier,
    window: Window | PlanKind = "static",
    *,
    round_index: int = 0,
    seed: int = 0,
) -> Plan:
    """Choose the units a tier keeps in a round, counted from 0.

    The plan is a function of the arguments alone.

    A kind of window alone has the defaults of `Window`. The seed is for random plans; give each
    device its own to draw for every client separately.

    Raises:
        PlanError: if the model cannot have this tier, an argument is out of range, or units that
            are not interchangeable would be exchanged.
    """
    rule = window if isinstance(window, Window) else Window(window)
    for name, value in (("round_index", round_index), ("seed", seed)):
        if value < 0:
            raise PlanError(f"a plan needs {name} >= 0, not {value}")

    ordered = next((axis.name for axis in layout.axes.values() if axis.leading), None)
    if ordered is not None and rule.kind != "static":
        raise PlanError(
            f"{layout.arch}: axis {ordered} was declared leading, so its units cannot be exchanged as {rule.kind} plans"
            " do; choose a method with static plans, such as heterofl"
        )

    if layout.cut_base is not None and rule.kind != "static":
        raise PlanError(
            f"{layout.arch}: {layout.cut_base} is frozen and a width cuts it: boards keep its leading units on disk,"
            f" beside which {rule.kind} plans would move; build it with cut.whole(), let it train, or choose a method"
            " with static plans, such as heterofl"
        )

    def units(axis: Axis, label: str) -> Indices:
        if rule.kind == "random":
            return random_units(axis, tier.width, seed=seed, round_index=round_index, label=label)
        shift = 0 if rule.kind == "static" else rule.step * round_index
        return rolling_units(
            axis, tier.width, shift=shift, direction=rule.direction, heads=rule.heads
        )

    blocks = layout.blocks(tier)
    indices = {
        name: units(axis, name) for name, axis in layout.axes.items() if axis.kind is AxisKind.WIDTH
    }
    overrides: dict[tuple[str, int, str], Indices] = {}
    if rule.kind == "random" and rule.draw == "per_layer":
        # The chain of the specification, shared notation: each layer draws its outputs; its inputs
        # are the outputs that were drawn last on the same axis.
        current = dict(indices)
        for parameter in layout.kept(tier):
            output = _output_dim(layout, parameter)
            for position, dim in enumerate(parameter.dims):
                for axis in dict.fromkeys(
                    part.axis for part in dim.segments if part.axis in current
                ):
                    if position == output:
                        current[axis] = units(layout.axes[axis], parameter.name)
                    overrides[parameter.name, position, axis] = current[axis]
    return Plan(tier, rule.kind, blocks, indices, overrides)


def _output_dim(layout: Layout, parameter: Parameter) -> int | None:
    """Find the dimension along which a layer draws: the first, or the second of an embedding table."""
    widths = [
        position
        for position, dim in enumerate(parameter.dims)
        if layout.is_cut(dim) and len(parameter.dims) > 1
    ]
    return widths[0] if widths and (widths[0] == 0 or parameter.block == STEM) else None


def compile_plan(layout: Layout, plan: Plan) -> CompiledPlan:
    """Find once what a plan moves of every kept parameter and then statistic, for use on many sets
    of weights.
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
        label_axes=layout.labelled,
    )


def _units(layout: Layout, plan: Plan, item: Parameter | Statistic) -> list[Mapping[str, Indices]]:
    """For each dimension the kept units of its axes; none of an axis that is kept whole."""
    owner = item.name if isinstance(item, Parameter) else f"{item.name}.weight"
    return [
        {
            part.axis: plan.overrides.get((owner, position, part.axis), plan.indices[part.axis])
            for part in dim.segments
            if layout.axes[part.axis].kind is AxisKind.WIDTH
        }
        for position, dim in enumerate(item.dims)
    ]


def slice_weights(
    layout: Layout, plan: Plan | CompiledPlan, weights: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Copy a sub-model's tensors out of the global ones, parameters in registration order, then
    statistics if given.

    Raises:
        PlanError: if a kept parameter is missing or has another shape.
    """
    compiled = plan if isinstance(plan, CompiledPlan) else compile_plan(layout, plan)
    return compiled.slice(weights)
