"""The proof of a layout: units of an axis that change places in every tensor change nothing that
the model computes.

Two models with the same units in another order are the same model. So a layout is right only if
permuting the units of each axis, as it says, leaves the outputs of the whole model, and gives the
gradients of a training step in the same order. That holds for gates and norms, too, where comparing
with a model whose other units are zero does not.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from models.axes import Axis, AxisKind
from models.dims import Dim
from models.zoo.arranging import Arranged, arranged, dims_of, read, whole_axes
from models.zoo.exchange import Dims, Run, Subject, exchanged, turned
from models.zoo.probing import Growth, Shapes

ALIKE = 1e-3
"""Largest deviation of a layout that holds, of the largest value: right ones deviate by 1e-6, wrong
ones by a share.
"""

_FAINT = 1e-2  # of the largest gradient of all: below, a tensor's own gradients are rounding errors


@dataclass(frozen=True)
class View:
    """A model to prove a layout on, whole or narrower, and what it computes, with gradients if
    these are compared.
    """

    subject: Subject
    shapes: Shapes
    axes: Mapping[str, Axis]
    before: Run


@dataclass(frozen=True)
class Case:
    """A model whose layout is asked for."""

    # the whole model first. A narrower one tells orders apart that are alike in the whole: whether
    # four heads of four become two heads, or four of two. Others have samples and parameters of
    # other sizes
    views: tuple[View, ...]
    growth: Growth  # which dimensions the axes move

    @property
    def subject(self) -> Subject:
        """The whole model."""
        return self.views[0].subject

    @property
    def shapes(self) -> Shapes:
        """Of the whole model."""
        return self.views[0].shapes

    @property
    def axes(self) -> Mapping[str, Axis]:
        """What the builder asked for."""
        return self.views[0].axes


@dataclass(frozen=True)
class Proved:
    """A layout that holds, and the largest deviation of its proof, relative to the largest value."""

    dims: Mapping[str, tuple[Dim, ...]]
    deviation: float


@dataclass(frozen=True)
class Doubt:
    """A layout that does not hold."""

    axis: str  # whose units are not interchangeable, or lie in no order that can be read
    dims: Dims  # the best that was tried; None where there was nothing to try
    deviation: float  # with this axis alone, relative to the largest value


def proved_dims(case: Case) -> Proved | Doubt:
    """Find the order of the entries in every dimension, and prove it.

    Or the first axis for which there is none.
    """
    orders = {name: _usual(case, axis) for name, axis in case.axes.items()}
    deviation = math.inf
    if None not in orders.values():
        deviation = deviation_of(case, _joined(case, orders), _movable(case))
    if not deviation < ALIKE:
        for axis in case.axes.values():
            order = _settled(case, axis)
            if isinstance(order, Doubt):
                return order
            orders[axis.name] = order
        deviation = deviation_of(case, _joined(case, orders), _movable(case))
    dims = _joined(case, orders)
    if deviation < ALIKE:
        return Proved(
            {name: tuple(dim for dim in row if dim is not None) for name, row in dims.items()},
            deviation,
        )
    return Doubt(next(iter(_movable(case)), ""), dims, deviation)


def deviation_of(case: Case, dims: Dims, names: Sequence[str]) -> float:
    """How much exchanging the units of some axes changes outputs and gradients, relative to the
    largest.

    What follows the first view that shows it is left out.
    """
    worst = 0.0
    for view in case.views:
        worst = max(worst, _deviation(view, dims, names))
        if not worst < ALIKE:
            break
    return worst


def _deviation(view: View, dims: Dims, names: Sequence[str]) -> float:
    axes = whole_axes(view.axes, dims)
    if any(
        dim is not None and dim.length(axes, 1.0) != size
        for name, shape in view.shapes.items()
        for dim, size in zip(dims[name], shape, strict=True)
    ):
        return math.inf
    units = {name: turned(axes[name], seed) for seed, name in enumerate(names)}
    before = view.before
    state = exchanged(view.subject.state, dims, axes, units)
    after = view.subject.run(state, gradients=bool(before.gradients))
    gradients = exchanged(after.gradients, dims, axes, units, back=True)
    pairs = [*zip(before.outputs, after.outputs, strict=True)]
    pairs += [(value, gradients[name]) for name, value in before.gradients.items()]
    sizes = [_largest(old) for old, _ in pairs]
    faint = _FAINT * max(sizes[len(before.outputs) :], default=0.0)
    least = [0.0 if at < len(before.outputs) else faint for at in range(len(pairs))]
    found = [
        _largest(new - old) / max(size, floor, 1e-30)
        for (old, new), size, floor in zip(pairs, sizes, least, strict=True)
    ]
    return max((math.inf if math.isnan(value) else value for value in found), default=0.0)


def _largest(value: Tensor) -> float:
    if not value.numel():
        return 0.0
    low, high = value.aminmax()
    return max(-float(low), float(high))


def _movable(case: Case) -> list[str]:
    return [
        axis.name for axis in case.axes.values() if axis.kind is AxisKind.WIDTH and not axis.leading
    ]


def _joined(case: Case, orders: Mapping[str, Arranged | None]) -> dict[str, list[Dim | None]]:
    found = dims_of(
        case.shapes,
        case.axes,
        case.growth,
        [order for order in orders.values() if order],
    )
    return {name: [*row] for name, row in found.items()}


def _usual(case: Case, axis: Axis) -> Arranged | None:
    """The entries of each unit side by side; None where several axes share a dimension."""
    return arranged(case.shapes, axis, case.growth)


def _settled(case: Case, axis: Axis) -> Arranged | Doubt:
    """The first order of an axis that holds."""
    usual = _usual(case, axis)
    # Nothing is to be decided where no unit can leave its place, or each has one entry.
    clear = all(
        row[axis.name] in (1, axis.groups) for row in case.growth.values() if axis.name in row
    )
    if usual is not None and (
        axis.kind is AxisKind.FIXED or axis.group_size == 1 or (axis.leading and clear)
    ):
        return usual
    is_joined = any(axis.name in row and len(row) > 1 for row in case.growth.values())
    best: Doubt | None = None
    for order in _orders(case, axis):
        dims = _joined(case, {axis.name: order})
        # What else lies in a dimension is not known yet, and changes with the size of the model.
        deviation = deviation_of(
            replace(case, views=case.views[:1]) if is_joined else case,
            dims,
            [axis.name],
        )
        if deviation < ALIKE:
            return order
        if best is None or deviation < best.deviation:
            best = Doubt(axis.name, dims, deviation)
    return best or Doubt(axis.name, _joined(case, {}), math.inf)


def _orders(case: Case, axis: Axis) -> Iterator[Arranged]:
    """Orders to try: the same everywhere, then what can be read off the model."""
    styles = _styles(case, axis)
    for style in (None, *styles):
        order = arranged(case.shapes, axis, case.growth, style)
        if order is not None:
            yield order
    yield from read(case.subject, case.shapes, case.axes, axis, case.growth, styles)


def _styles(case: Case, axis: Axis) -> list[int]:
    """Numbers of consecutive entries that the axis can have everywhere."""
    counts = [row[axis.name] for row in case.growth.values() if axis.name in row]
    least = math.gcd(*(count if count % axis.groups else count // axis.groups for count in counts))
    return [number for number in range(least, 0, -1) if least % number == 0]
