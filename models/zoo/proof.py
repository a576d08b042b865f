"""Proves a layout: permuting the units of an axis everywhere does not change the results.

Two models with the same units in a different order are the same model. So a layout is right only if
permuting the units of each axis by it keeps the outputs of the whole model, and permutes the
gradients of a training step. This also works for gates and norms, for which a comparison with a
model with zeroed units does not.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.axes import Axis, AxisKind
from models.dims import Dim
from models.zoo.entry_order import EntryOrder, join_orders, uniform_order, with_fixed_axes
from models.zoo.growth import Dimensions, Growth, Shapes
from models.zoo.permuting import Dims, derangement_of, permute
from models.zoo.randomized_model import RandomizedModel, Run, exact_model
from models.zoo.reading_order import read_orders

TOLERANCE = 1e-3
"""The largest deviation of a right layout, as a share of the largest value.

Right layouts deviate by 1e-6, wrong ones by much more.
"""

# A share of the largest gradient: a tensor whose gradients are smaller has only rounding errors.
_FAINT = 1e-2


@dataclass(frozen=True)
class Variant:
    """A variant of the model for the proof of a layout: its size, samples and mode."""

    model: RandomizedModel
    shapes: Shapes
    axes: Mapping[str, Axis]
    before: Run  # what it computes with all units in place; without gradients, none are compared


@dataclass(frozen=True)
class ProofTask:
    """A model whose layout is to be proved."""

    # The whole model first. A narrower one distinguishes orders that are equal in the whole model:
    # whether four heads of four become two heads, or four of two. Others have samples and
    # parameters of other sizes.
    variants: tuple[Variant, ...]
    growth: Growth
    # Those of them on which orders are looked for: the whole model on small samples, which takes
    # less time, and a narrower one. Without any, all are.
    cheap: tuple[Variant, ...] = ()

    @property
    def searched(self) -> "ProofTask":
        """The task of looking for orders, which `variants` prove."""
        return replace(self, variants=self.cheap or self.variants, cheap=())

    @property
    def whole(self) -> Variant:
        """The model of full size."""
        return self.variants[0]

    @property
    def dimensions(self) -> Dimensions:
        """The dimensions of the whole model."""
        return Dimensions(self.whole.shapes, self.whole.axes, self.growth)

    def growth_of(self, axis: Axis) -> list[int]:
        """List what one more unit in each group of an axis adds, for every dimension it moves."""
        growth: list[int] = []
        for entries in self.growth.values():
            if axis.name in entries:
                growth.append(entries[axis.name])
        return growth


@dataclass(frozen=True)
class Proof:
    """A proved layout, and its largest deviation as a share of the largest value."""

    dims: Mapping[str, tuple[Dim, ...]]
    deviation: float


@dataclass(frozen=True)
class Refutation:
    """An axis without a right layout."""

    axis: str  # its units are not interchangeable, or have no order that can be found
    dims: Dims  # the best that was tried; None if there was nothing to try
    deviation: float  # if only this axis is permuted, as a share of the largest value


def in_double_precision(task: ProofTask) -> ProofTask | None:
    """Return a task whose models compute in double precision; None if one of them cannot.

    A model may magnify rounding, and its gradients even more, so that orders cannot be read from
    it, or a right one seems to change what it computes.
    """
    doubled: dict[int, Variant] = {}  # by the id of the variant in single precision
    try:
        for variant in (*task.variants, *task.cheap):
            if id(variant) in doubled:
                continue
            # Variants with rare values are in double precision already.
            if variant.model.is_exact:
                doubled[id(variant)] = variant
                continue
            model = variant.model.scaled(variant.model.samples, 1.0, torch.float64)
            before = model.run(gradients=bool(variant.before.gradients))
            # A model may be made for single precision only, such as CANINE of transformers.
            if _has_nan(before) and not _has_nan(variant.before):
                return None
            doubled[id(variant)] = replace(variant, model=model, before=before)
    except Exception:  # noqa: BLE001 - such as for float32 tensors that a model makes
        return None
    variants = tuple(doubled[id(variant)] for variant in task.variants)
    return replace(task, variants=variants, cheap=tuple(doubled[id(one)] for one in task.cheap))


def prove_layout(task: ProofTask) -> Proof | Refutation:
    """Find the order of the entries in every dimension, and prove it.

    The usual order is tried for all axes at once, as it mostly holds. Otherwise each axis is
    settled separately, and then all are proved together.
    """
    return prove_usual_orders(task) or search_orders(task)


def prove_usual_orders(task: ProofTask) -> Proof | None:
    """Return the proof that the entries of each unit lie side by side; None if it fails."""
    usual = _usual_orders(task)
    if usual is None:
        return None
    dims = _join(task, usual)
    deviation = deviation_of(task, dims, movable_axes(task.dimensions.axes))
    if deviation < TOLERANCE:
        return _proof(dims, deviation)
    return None


def search_orders(task: ProofTask) -> Proof | Refutation:
    """Look for an order of each axis by itself, and prove all of them together."""
    movable = movable_axes(task.dimensions.axes)
    # Orders that only the cheap variants confirm are looked for once more, on all of them.
    tasks = [task.searched, task] if task.cheap else [task]
    for searched in tasks:
        orders = _settle_axes(searched)
        if isinstance(orders, Refutation):
            return orders
        dims = _join(task, orders)
        deviation = deviation_of(task, dims, movable)
        if deviation < TOLERANCE:
            return _proof(dims, deviation)
    return Refutation(next(iter(movable), ""), dims, deviation)


def movable_axes(axes: Mapping[str, Axis]) -> list[str]:
    """Name the axes whose units must be interchangeable."""
    movable: list[str] = []
    for axis in axes.values():
        if axis.kind is AxisKind.WIDTH and not axis.leading:
            movable.append(axis.name)
    return movable


def _usual_orders(task: ProofTask) -> dict[str, EntryOrder] | None:
    """Return the order of each axis with the entries of each unit side by side."""
    orders: dict[str, EntryOrder] = {}
    for name, axis in task.dimensions.axes.items():
        usual = uniform_order(task.dimensions, axis)
        if usual is None:
            return None
        orders[name] = usual
    return orders


def _settle_axes(task: ProofTask) -> dict[str, EntryOrder] | Refutation:
    """Return an order for each axis that holds when only this axis is permuted."""
    orders: dict[str, EntryOrder] = {}
    # Blocks are joined in the order of the axes.
    for name, axis in task.dimensions.axes.items():
        order = _settle_axis(task, axis)
        if isinstance(order, Refutation):
            return order
        orders[name] = order
    return orders


def _join(task: ProofTask, orders: Mapping[str, EntryOrder]) -> dict[str, list[Dim | None]]:
    return join_orders(task.dimensions, [*orders.values()])


def _proof(dims: Dims, deviation: float) -> Proof:
    complete = {}
    for name, row in dims.items():
        complete[name] = tuple(dim for dim in row if dim is not None)
    return Proof(complete, deviation)


def deviation_of(task: ProofTask, dims: Dims, names: Sequence[str]) -> float:
    """Return how much permuting the units of some axes changes outputs and gradients.

    Args:
        task: the model.
        dims: the layout to try.
        names: the axes to permute, all at once.

    Returns:
        The largest change as a share of the largest value, in the first variant that exceeds the
        tolerance, or else in any.
    """
    if not names:
        return _deviation_of_none(task)
    worst = 0.0
    # The whole model takes most of the time, and narrower ones refute most layouts.
    for variant in (*task.variants[1:], task.whole):
        worst = max(worst, _deviation_in(variant, dims, names))
        if not worst < TOLERANCE:
            break
    return worst


def _deviation_of_none(task: ProofTask) -> float:
    """Return the deviation if nothing is permuted: of a model that computes NaN it has no bound."""
    if any(_has_nan(variant.before) for variant in task.variants):
        return math.inf
    return 0.0


def _has_nan(run: Run) -> bool:
    return any(bool(output.isnan().any()) for output in run.outputs)


def _deviation_in(variant: Variant, dims: Dims, names: Sequence[str]) -> float:
    axes = with_fixed_axes(variant.axes, dims)
    if not _have_lengths(dims, axes, variant.shapes):
        return math.inf
    units = {name: derangement_of(axes[name], seed) for seed, name in enumerate(names)}
    before = variant.before
    moved = permute(variant.model.parameters, dims, axes, units)
    after = variant.model.run(moved, gradients=bool(before.gradients))
    gradients = permute(after.gradients, dims, axes, units, back=True)

    return _change_of_run(before, Run(after.outputs, gradients))


def _change_of_run(before: Run, after: Run) -> float:
    """Return the largest change of outputs and gradients as a share of the largest value."""
    deviation = 0.0
    for old, new in zip(before.outputs, after.outputs, strict=True):
        deviation = max(deviation, _change(old, new, least=0.0))
    largest_gradients = [_largest(gradient) for gradient in before.gradients.values()]
    faint = _FAINT * max(largest_gradients, default=0.0)
    for name, gradient in before.gradients.items():
        deviation = max(deviation, _change(gradient, after.gradients[name], least=faint))
    return deviation


def _have_lengths(dims: Dims, axes: Mapping[str, Axis], shapes: Shapes) -> bool:
    """Return whether all dimensions that are known have the lengths of a model's shapes."""
    for name, shape in shapes.items():
        for dim, size in zip(dims[name], shape, strict=True):
            if dim is not None and dim.length(axes, 1.0) != size:
                return False
    return True


def _change(old: Tensor, new: Tensor, *, least: float) -> float:
    """Return the largest change of a tensor as a share of its largest value, at least `least`."""
    change = _largest(new - old) / max(_largest(old), least, 1e-30)
    return math.inf if math.isnan(change) else change


def _largest(value: Tensor) -> float:
    if not value.numel():
        return 0.0
    low, high = value.aminmax()
    return max(-float(low), float(high))


def _settle_axis(task: ProofTask, axis: Axis) -> EntryOrder | Refutation:
    """Return the first order of an axis that holds when only this axis is permuted."""
    usual = uniform_order(task.dimensions, axis)
    if usual is not None and _has_one_order(task, axis):
        return usual
    variants = task.variants
    if _shares_dimension(task, axis):
        # The other entries of the dimension are unknown so far, and change with the size of the
        # model.
        variants = task.variants[:1]
    best: Refutation | None = None
    for order in _orders_to_try(task, axis):
        dims = join_orders(task.dimensions, [order])
        deviation = deviation_of(replace(task, variants=variants), dims, [axis.name])
        if deviation < TOLERANCE:
            return order
        if best is None or deviation < best.deviation:
            best = Refutation(axis.name, dims, deviation)
    return best or Refutation(axis.name, join_orders(task.dimensions, []), math.inf)


def _shares_dimension(task: ProofTask, axis: Axis) -> bool:
    """Return whether another axis moves a dimension that this axis moves, too."""
    return any(len(task.growth[place]) > 1 for place in task.dimensions.places_of(axis))


def _has_one_order(task: ProofTask, axis: Axis) -> bool:
    """Return whether an axis has one order only: no unit can move, or each has one entry."""
    if axis.kind is AxisKind.FIXED or axis.group_size == 1:
        return True
    return axis.leading and all(count in {1, axis.groups} for count in task.growth_of(axis))


def _orders_to_try(task: ProofTask, axis: Axis) -> Iterator[EntryOrder]:
    """Yield orders that are the same everywhere, then those that can be read off the model."""
    styles = _styles(task, axis)
    for style in (None, *styles):
        order = uniform_order(task.dimensions, axis, style)
        if order is not None:
            yield order
    yield from read_orders(exact_model(task.whole.model), task.dimensions, axis, styles)


def _styles(task: ProofTask, axis: Axis) -> list[int]:
    """List the numbers of consecutive entries that the axis can have everywhere, from the most."""
    counts: list[int] = []
    for entries in task.growth_of(axis):
        is_shared = entries % axis.groups != 0  # by the groups
        counts.append(entries if is_shared else entries // axis.groups)
    divisor = math.gcd(*counts)
    styles: list[int] = []
    for number in range(divisor, 0, -1):
        if divisor % number == 0:
            styles.append(number)
    return styles
