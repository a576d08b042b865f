"""Measures which dimensions of parameters grow with an axis, and by how many entries.

A model is built with an axis enlarged by the smallest step that its builder supports: normalised
groups, grouped convolutions and heads need multiples. Each dimension must grow by a whole number of
entries per unit.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fleet_protocol.errors import ConfigError, ModelError
from models.axes import Axis, AxisKind

Shapes = dict[str, tuple[int, ...]]
"""The shape of each parameter, in the order of registration."""

Place = tuple[str, int]
"""A dimension: the name of a parameter, and the position in its shape."""

Growth = dict[Place, dict[str, int]]
"""For each dimension that grows: by axis, the entries that one more unit in each group adds."""

_ROUNDINGS = (4, 8, 16, 32)  # to multiples of which builders round sizes
_USE_THE_SIZE = "use the size that the cut returns, or do not request the axis"

Build = Callable[[Mapping[str, int]], Shapes]
"""Returns the shapes of the model with axes enlarged by this many units in each group."""


@dataclass(frozen=True)
class Dimensions:
    """All dimensions of a model, and the axes that change them."""

    shapes: Shapes
    axes: Mapping[str, Axis]
    growth: Growth

    def size(self, place: Place) -> int:
        """Return the number of entries of a dimension."""
        name, position = place
        return self.shapes[name][position]

    def places_of(self, axis: Axis) -> list[Place]:
        """List the dimensions that an axis moves."""
        places: list[Place] = []
        for place, entries in self.growth.items():
            if axis.name in entries:
                places.append(place)
        return places


def measure_growth(title: str, axes: Mapping[str, Axis], shapes: Shapes, build: Build) -> Growth:
    """Measure the growth with each axis.

    Args:
        title: the architecture, for messages.
        axes: the axes that its builder requested.
        shapes: those of the model as it is, for comparison.
        build: builds it with larger axes.

    Raises:
        ConfigError: an axis changes nothing, or not by a whole number of entries per unit.
    """
    probe = _Probe(title, axes, shapes, build)
    growth = probe.measure(smallest_steps=True)
    if not probe.predicts_doubled_model(growth):
        # Rounded sizes, such as embed // heads, do not change with every step.
        growth = probe.measure(smallest_steps=False)
    for place, entries in growth.items():
        probe.check_concatenation(place, entries)
    return growth


@dataclass(frozen=True)
class _Probe:
    """A model to build with larger axes."""

    title: str
    axes: Mapping[str, Axis]
    shapes: Shapes
    build: Build

    def measure(self, *, smallest_steps: bool) -> Growth:
        growth: Growth = {}
        for axis in self.axes.values():
            step, grown = self._build_larger(axis, smallest_step=smallest_steps)
            # By rank only: sizes are what this measures.
            if _ranks(grown) != _ranks(self.shapes):
                raise ModelError(
                    f"{self.title}: its set of parameters changes with the size of {axis.name};"
                    " only shapes may change"
                )
            added = self._added_entries(axis, step, grown)
            if not added:
                raise ModelError(
                    f"{self.title}: no parameter grows with axis {axis.name}; "
                    f"{self._advice_on_rounding(axis) or _USE_THE_SIZE}"
                )
            for place, entries in added.items():
                growth.setdefault(place, {})[axis.name] = entries
        return growth

    def _build_larger(self, axis: Axis, *, smallest_step: bool) -> tuple[int, Shapes]:
        """Build with the first step that can be built.

        Sizes of layers divide the axis, so divisors of it are enough.
        """
        first_error: ConfigError | None = None
        # Without small steps, only doubling the axis is tried.
        for step in range(1 if smallest_step else axis.group_size, axis.group_size + 1):
            if axis.group_size % step:
                continue
            try:
                return step, self.build({axis.name: step})
            except ConfigError as error:
                first_error = first_error or error
        raise ModelError(
            f"{first_error} (with more units of axis {axis.name}: a builder must support other"
            " sizes)"
        )

    def _advice_on_rounding(self, axis: Axis) -> str:
        """Return the advice for a builder that rounds sizes to multiples; "" for another one.

        It is given only if twice as many units add twice as many entries.
        """
        for units in _ROUNDINGS:
            if axis.groups > 1 or axis.size % units or axis.size == units:
                continue
            try:
                once = self.build({axis.name: units})
                twice = self.build({axis.name: 2 * units})
            except ConfigError:
                continue
            if once != self.shapes and _grows_evenly(self.shapes, once, twice):
                return (
                    f"it is rounded to a multiple of {units}: request cut.groups({axis.name!r},"
                    f" {axis.size // units}) * {units}"
                )
        return ""

    def _added_entries(self, axis: Axis, step: int, grown: Shapes) -> dict[Place, int]:
        """Return for each dimension that grew the entries that one unit in each group adds."""
        added: dict[Place, int] = {}
        for name, shape in self.shapes.items():
            for position, (before, after) in enumerate(zip(shape, grown[name], strict=True)):
                if before == after:
                    continue
                entries, remainder = divmod(after - before, step)
                if remainder or entries < 1:
                    raise ModelError(
                        f"{self.title}: dimension {position} of {name} has {before} entries, and"
                        f" {after} with {step} more units of {axis.name} ({axis.size} units),"
                        " which is not a whole number of entries per unit; compute every size"
                        f" by multiplication and addition{_remedies(axis, step, after - before)}"
                    )
                added[name, position] = entries
        return added

    def predicts_doubled_model(self, growth: Growth) -> bool:
        """Return whether doubling all axes together changes every dimension as measured.

        That shows products of two axes, which single steps cannot. Two sizes that are equal only
        in the doubled model may add or remove a layer, so it is tripled where its set of parameters
        changes.
        """
        for multiple in (1, 2):
            added = {axis.name: multiple * axis.group_size for axis in self.axes.values()}
            try:
                larger = self.build(added)
            except ConfigError:
                # A builder that refuses this size does not contradict the measurements.
                return True
            if _ranks(larger) == _ranks(self.shapes):
                return larger == self._predicted(growth, multiple)
        return False

    def _predicted(self, growth: Growth, multiple: int) -> Shapes:
        """Return the shapes with all axes larger by a multiple of their size."""
        predicted: Shapes = {}
        for name, shape in self.shapes.items():
            expected: list[int] = []
            for position, size in enumerate(shape):
                added = self._units_entries(growth.get((name, position), {}))
                expected.append(size + multiple * added)
            predicted[name] = tuple(expected)
        return predicted

    def _units_entries(self, entries: Mapping[str, int]) -> int:
        """Count the entries that all units of the axes have in one dimension."""
        return sum(count * self.axes[axis].group_size for axis, count in entries.items())

    def check_concatenation(self, place: Place, entries: Mapping[str, int]) -> None:
        """Refuse a dimension that is not a concatenation of axes."""
        name, position = place
        size = self.shapes[name][position]
        dimension = f"dimension {position} of {name}"
        # More entries than the dimension has: the axes multiply, or one enters squared.
        if self._units_entries(entries) > size:
            first, *further = entries
            cause = f"by {entries[first]} with each unit of {first}"
            if further:
                cause = f"with both {first} and {further[0]}"
            raise ModelError(
                f"{self.title}: {dimension} has {size} entries and grows {cause}, which is not a"
                " concatenation; give each part its own parameter, and each factor of a product"
                " its own dimension"
            )
        for axis_name, count in entries.items():
            axis = self.axes[axis_name]
            if axis.kind is not AxisKind.FIXED:
                continue
            # The rows of labels must be a dimension without other entries.
            if len(entries) > 1 or count * axis.size != size:
                raise ModelError(
                    f"{self.title}: {dimension} has {size} entries, {axis.size} of them for the"
                    f" labels {axis_name}; put the other entries into a separate parameter"
                )


def _grows_evenly(shapes: Shapes, once: Shapes, twice: Shapes) -> bool:
    """Return whether every dimension grows by the same number of entries both times."""
    if not _ranks(shapes) == _ranks(once) == _ranks(twice):
        return False
    for name, shape in shapes.items():
        for first, second, third in zip(shape, once[name], twice[name], strict=True):
            if third - second != second - first:
                return False
    return True


def _ranks(shapes: Shapes) -> list[tuple[str, int]]:
    return [(name, len(shape)) for name, shape in shapes.items()]


def _remedies(axis: Axis, step: int, entries: int) -> str:
    """Return other requests for an axis whose step of units added some entries."""
    # Its request names groups already.
    if axis.groups > 1:
        return ""
    # the smallest number of units with a whole number of entries
    units = step // math.gcd(step, entries)
    remedies = ""
    if units > 1 and axis.size % units == 0:
        remedies = (
            f", from a smaller axis: cut.width({axis.name!r}, {axis.size // units}) * {units}"
            f" gives the size {axis.size}"
        )
    if step in {1, axis.size}:
        return remedies
    size = axis.size // step
    return (
        f"{remedies}, and if a layer takes {axis.name} in {step} groups, cut inside them with "
        f"cut.heads({axis.name!r}, {step}, {size}) * {step} or whole ones with "
        f"cut.groups({axis.name!r}, {step}) * {size}"
    )
