"""Plans: the kept blocks and units of every axis, and what is trained, for a tier in a round.

`make_plan` draws a plan; `compile_plan` finds its runs of consecutive units, once for many updates.
`slice_weights` then copies these runs from the global weights with plain strided copies, and
merging adds them back by the same runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from numpy.typing import NDArray

from fleet_protocol.errors import PlanError
from models.axes import Axis, AxisKind
from models.block_names import STEM
from models.dims import Dim
from models.draws import Indices, PlanKind, Window, random_units, rolling_units
from models.layout import Layout
from models.parameters import Parameter
from models.shares import frozen_parameters
from models.slicing import CompiledPlan, CompiledTensor, compile_tensor
from models.tier import Tier

Place = tuple[str, int, str]
"""An axis in a dimension: parameter, position of the dimension, name of the axis."""


@dataclass(frozen=True, eq=False)
class Plan:
    """The part of a global model in a sub-model."""

    tier: Tier
    kind: PlanKind
    blocks: frozenset[str]  # names of the kept blocks
    # for each width axis its kept units in local order, int64, read-only
    indices: Mapping[str, Indices]
    # units of single dimensions, by (parameter name, dimension, axis), that differ from `indices`;
    # only plans drawn ``per_layer`` have them
    overrides: Mapping[Place, Indices] = field(default_factory=dict)
    # parameters that the sub-model holds and does not train, so that no update has them
    frozen: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        # Devices of a round share plans, so nobody may change the units of one.
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
    """Choose the units that a tier keeps in a round.

    The plan depends only on the arguments.

    Args:
        layout: the global model.
        tier: the sub-model.
        window: the selection of units; a kind uses the defaults of `Window`.
        round_index: number of the round, from 0.
        seed: seed for random plans; with one seed per device, each device gets its own units.

    Raises:
        PlanError: the model does not support this tier, an argument is out of range, or units that
            are not interchangeable would be exchanged.
    """
    rule = window if isinstance(window, Window) else Window(window)
    for name, value in (("round_index", round_index), ("seed", seed)):
        if value < 0:
            raise PlanError(f"a plan needs {name} >= 0, not {value}")

    # A static plan keeps the leading units, which every model supports.
    if rule.kind != "static":
        _check_units_may_move(layout, rule.kind)
    draw = _Draw(rule, tier.width, round_index, seed)
    blocks = layout.blocks(tier)
    indices: dict[str, Indices] = {}
    for name, axis in layout.axes.items():
        # Other axes keep all units at every width.
        if axis.kind is AxisKind.WIDTH:
            indices[name] = draw.units(axis, name)
    overrides: dict[Place, Indices] = {}
    # Other kinds move all layers of an axis together, so one set of units per axis describes them.
    if rule.kind == "random" and rule.draw == "per_layer":
        overrides = _draw_per_layer(layout, tier, draw, indices)
    frozen = frozenset(frozen_parameters(layout, tier))
    return Plan(tier, rule.kind, blocks, indices, overrides, frozen)


def _check_units_may_move(layout: Layout, kind: PlanKind) -> None:
    """Refuse plans that exchange units if only the leading ones are a valid model."""
    for axis in layout.axes.values():
        if axis.leading:
            raise PlanError(
                f"{layout.arch}: axis {axis.name} was declared leading, so {kind} plans cannot"
                " exchange its units; choose a method with static plans, such as heterofl"
            )
    if layout.cut_base is not None:
        raise PlanError(
            f"{layout.arch}: {layout.cut_base} is frozen, and a width cuts it: boards keep its"
            f" leading units on disk, which do not match the units of {kind} plans; build it"
            " with cut.whole(), make it trainable, or choose a method with static plans, such"
            " as heterofl"
        )


@dataclass(frozen=True)
class _Draw:
    """Draws the units of axes for one tier in one round."""

    window: Window
    width: float
    round_index: int
    seed: int

    def units(
        self,
        axis: Axis,
        label: str,
    ) -> Indices:
        """Return the units of an axis; the label is that of `random_units`."""
        window = self.window
        if window.kind == "random":
            return random_units(
                axis, self.width, seed=self.seed, round_index=self.round_index, label=label
            )
        shift = 0 if window.kind == "static" else window.step * self.round_index
        return rolling_units(
            axis, self.width, shift=shift, direction=window.direction, heads=window.heads
        )


def _draw_per_layer(
    layout: Layout, tier: Tier, draw: _Draw, indices: Mapping[str, Indices]
) -> dict[Place, Indices]:
    """Draw the outputs of each layer separately.

    This is the chain of the specification, shared notation: the inputs of a layer are the last
    drawn outputs on the same axis, initially those of the tied draw.
    """
    overrides: dict[Place, Indices] = {}
    current = dict(indices)
    for parameter in layout.kept(tier):
        output = _output_dim(layout, parameter)
        for position, dim in enumerate(parameter.dims):
            # Each axis once, in order: an axis may occur in several segments.
            for axis in dict.fromkeys(segment.axis for segment in dim.segments):
                if axis not in current:
                    continue
                if position == output:
                    # By name, so that a layer's draw does not depend on the layers before it.
                    current[axis] = draw.units(layout.axes[axis], parameter.name)
                overrides[parameter.name, position, axis] = current[axis]
    return overrides


def _output_dim(layout: Layout, parameter: Parameter) -> int | None:
    """Find the dimension that a layer draws: the first, or the second of an embedding table."""
    # A vector (a bias, or one of a norm) has the drawn units of its layer.
    if len(parameter.dims) < 2:
        return None
    for position, dim in enumerate(parameter.dims):
        if layout.is_cut(dim):
            draws = position == 0 or parameter.block == STEM
            return position if draws else None
    return None


def compile_plan(layout: Layout, plan: Plan) -> CompiledPlan:
    """Find the slices of every kept tensor of a plan, for use on many sets of weights."""
    tensors: list[CompiledTensor] = []
    for parameter in layout.parameters:
        if parameter.block in plan.blocks:
            units = _units(layout, plan, parameter.name, parameter.dims)
            tensors.append(compile_tensor(layout, parameter.name, parameter.dims, units))
    # Statistics are optional: weights have none until devices have measured them.
    required = frozenset(tensor.name for tensor in tensors)
    for statistic in layout.statistics:
        if statistic.block in plan.blocks:
            # The vectors of a norm are cut like its weight.
            units = _units(layout, plan, f"{statistic.name}.weight", statistic.dims)
            for name in statistic.tensors:
                tensors.append(compile_tensor(layout, name, statistic.dims, units))
    return CompiledPlan(
        title=f"{layout.arch} {plan.tier.id}",
        tensors=MappingProxyType({tensor.name: tensor for tensor in tensors}),
        required=required,
        label_axes=layout.labelled,
    )


def _units(
    layout: Layout, plan: Plan, parameter: str, dims: Sequence[Dim]
) -> list[Mapping[str, Indices]]:
    """Return for each dimension of a parameter the kept units of the axes that are cut."""
    units_of_dims: list[Mapping[str, Indices]] = []
    for position, dim in enumerate(dims):
        units: dict[str, Indices] = {}
        for segment in dim.segments:
            axis = segment.axis
            if layout.axes[axis].kind is AxisKind.WIDTH:
                # Only plans with a draw for each layer have other units in some dimension.
                usual = plan.indices[axis]
                units[axis] = plan.overrides.get((parameter, position, axis), usual)
        units_of_dims.append(units)
    return units_of_dims


def slice_weights(
    layout: Layout, plan: Plan | CompiledPlan, weights: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Copy a sub-model's tensors out of the global ones.

    Returns:
        Parameters in registration order, then statistics if `weights` has them.

    Raises:
        PlanError: a kept parameter is missing or has another shape.
    """
    compiled = plan if isinstance(plan, CompiledPlan) else compile_plan(layout, plan)
    return compiled.slice(weights)
