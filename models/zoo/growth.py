"""Measure which dimensions of which parameters grow with an axis, and by how many entries.

A model is built with an axis larger by the smallest step that its builder can build: normalised
groups, grouped convolutions and heads take multiples only. Each dimension must grow by a whole
number of entries for each unit.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fleet_protocol.errors import ConfigError
from models.axes import Axis, AxisKind

Shapes = dict[str, tuple[int, ...]]
"""The shape of each parameter, in the order of registration."""

Place = tuple[str, int]
"""A dimension: the name of a parameter, and the position in its shape."""

Growth = dict[Place, dict[str, int]]
"""For each dimension that grows: by axis, the entries that one more unit in each group adds."""

Build = Callable[[Mapping[str, int]], Shapes]
"""Returns the shapes of the model with some axes larger, by so many units in each group."""


@dataclass(frozen=True)
class Dimensions:
    """All dimensions of a model, and which axes move them."""

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


def measure_growth(title: str, axes: Mapping[str, Axis], build: Build) -> Growth:
    """Measure what grows with each axis.

    Args:
        title: the architecture, for messages.
        axes: the axes that its builder asked for.
        build: builds it with larger axes.

    Raises:
        ConfigError: if an axis moves nothing, or not by a whole number of entries for each unit.
    """
    probe = _Probe(title, axes, build({}), build)
    growth = probe.measure(smallest_steps=True)
    if not probe.predicts_doubled_model(growth):
        # Sizes that are rounded, such as embed // heads, do not move by every step.
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
            if _ranks(grown) != _ranks(self.shapes):
                raise ConfigError(
                    f"{self.title}: its parameters change with the size of {axis.name}; only "
                    "shapes may"
                )
            added = self._added_entries(axis, step, grown)
            if not added:
                raise ConfigError(
                    f"{self.title}: no parameter grows with axis {axis.name}; use the size the cut "
                    "returns, or do not ask for it"
                )
            for place, entries in added.items():
                growth.setdefault(place, {})[axis.name] = entries
        return growth

    def _build_larger(self, axis: Axis, *, smallest_step: bool) -> tuple[int, Shapes]:
        """Build with the first step that can be built.

        Sizes of layers divide the axis, so divisors of it are enough.
        """
        first_error: ConfigError | None = None
        for step in range(1 if smallest_step else axis.group_size, axis.group_size + 1):
            if axis.group_size % step:
                continue
            try:
                return step, self.build({axis.name: step})
            except ConfigError as error:
                first_error = first_error or error
        raise ConfigError(
            f"{first_error} (with more units of axis {axis.name}: a builder must take other sizes "
            "than its own)"
        )

    def _added_entries(self, axis: Axis, step: int, grown: Shapes) -> dict[Place, int]:
        """Return for each dimension that grew the entries that one unit in each group adds."""
        added: dict[Place, int] = {}
        for name, shape in self.shapes.items():
            for position, (before, after) in enumerate(zip(shape, grown[name], strict=True)):
                if before == after:
                    continue
                entries, remainder = divmod(after - before, step)
                if remainder or entries < 1:
                    raise ConfigError(
                        f"{self.title}: dimension {position} of {name} has {before} entries and "
                        f"{after} with {step} more units of {axis.name} ({axis.size} units), which "
                        "is no whole number of entries for each; compute every size by "
                        f"multiplication and addition{_remedies(axis, step, after - before)}"
                    )
                added[name, position] = entries
        return added

    def predicts_doubled_model(self, growth: Growth) -> bool:
        """Return whether doubling all axes together moves every dimension as was measured."""
        try:
            doubled = self.build({axis.name: axis.group_size for axis in self.axes.values()})
        except ConfigError:
            # A builder that refuses this size contradicts nothing that was measured.
            return True
        for name, shape in self.shapes.items():
            expected = []
            for position, size in enumerate(shape):
                added = self._units_entries(growth.get((name, position), {}))
                expected.append(size + added)
            if doubled.get(name) != tuple(expected):
                return False
        return True

    def _units_entries(self, entries: Mapping[str, int]) -> int:
        """Count the entries that all units of the axes have in one dimension."""
        return sum(count * self.axes[axis].group_size for axis, count in entries.items())

    def check_concatenation(self, place: Place, entries: Mapping[str, int]) -> None:
        """Refuse a dimension that cannot be a concatenation of axes."""
        name, position = place
        size = self.shapes[name][position]
        dimension = f"dimension {position} of {name}"
        if self._units_entries(entries) > size:
            first, *further = entries
            cause = f"by {entries[first]} with each unit of {first}"
            if further:
                cause = f"with both {first} and {further[0]}"
            raise ConfigError(
                f"{self.title}: {dimension} has {size} entries and grows {cause}, which is no "
                "concatenation; give each part a parameter of its own, and each factor of a "
                "product a dimension of its own"
            )
        for axis_name, count in entries.items():
            axis = self.axes[axis_name]
            if axis.kind is not AxisKind.FIXED:
                continue
            if len(entries) > 1 or count * axis.size != size:
                raise ConfigError(
                    f"{self.title}: {dimension} has {size} entries, {axis.size} of them for the "
                    f"labels {axis_name}; keep what is joined to it in a parameter of its own"
                )


def _ranks(shapes: Shapes) -> list[tuple[str, int]]:
    return [(name, len(shape)) for name, shape in shapes.items()]


def _remedies(axis: Axis, step: int, entries: int) -> str:
    """Name other ways to ask for an axis of which a step of units added some entries."""
    if axis.groups > 1:
        return ""
    # the fewest units for which there is a whole number of entries
    units = step // math.gcd(step, entries)
    remedies = ""
    if units > 1 and axis.size % units == 0:
        remedies = (
            f", from a smaller one: cut.width({axis.name!r}, {axis.size // units}) * {units} is a "
            f"size of {axis.size}"
        )
    if step in {1, axis.size}:
        return remedies
    size = axis.size // step
    return (
        f"{remedies}, and if a layer takes {axis.name} in {step} groups, cut inside them with "
        f"cut.heads({axis.name!r}, {step}, {size}) * {step} or whole ones with "
        f"cut.groups({axis.name!r}, {step}) * {size}"
    )
