"""Probing: which dimensions of which parameters grow with an axis, by how many entries.

A model is built on torch's meta device with an axis larger, by the smallest step that it can be
built with: normalised groups, grouped convolutions and heads take multiples only.
"""

import math
from collections.abc import Callable, Iterator, Mapping

from fleet_protocol.errors import ConfigError
from models.axes import Axis, AxisKind

Shapes = dict[str, tuple[int, ...]]

Place = tuple[str, int]
"""A dimension: the name of a parameter, and the position in its shape."""

Growth = dict[Place, dict[str, int]]
"""For each dimension that an axis moves, by axis: the entries that one more unit in each group
adds.
"""

Build = Callable[[Mapping[str, int]], Shapes]
"""Shapes of the model with some axes larger, by so many units in each of their groups."""


def grown_with(title: str, axes: Mapping[str, Axis], build: Build) -> Growth:
    """Find what grows with each axis.

    Raises:
        ConfigError: an axis moves nothing, or not by a whole number of entries for each unit.
    """
    shapes = build({})
    found = _probed(title, axes, shapes, build, smallest=True)
    if not _agrees(axes, shapes, found, build):
        # Sizes that are rounded, such as embed // heads, do not move by every step.
        found = _probed(title, axes, shapes, build, smallest=False)
    for (name, position), moved in found.items():
        _check(
            title,
            axes,
            f"dimension {position} of {name}",
            shapes[name][position],
            moved,
        )
    return found


def _probed(
    title: str,
    axes: Mapping[str, Axis],
    shapes: Shapes,
    build: Build,
    *,
    smallest: bool,
) -> Growth:
    found: Growth = {}
    for axis in axes.values():
        steps = range(1 if smallest else axis.group_size, axis.group_size + 1)
        step, grown = _larger(axis, build, (step for step in steps if axis.group_size % step == 0))
        if [(name, len(shape)) for name, shape in shapes.items()] != [
            (n, len(shape)) for n, shape in grown.items()
        ]:
            raise ConfigError(
                f"{title}: its parameters change with the size of {axis.name}; only shapes may"
            )
        reached = False
        for name, shape in shapes.items():
            for position, (before, after) in enumerate(zip(shape, grown[name], strict=True)):
                if before == after:
                    continue
                entries, rest = divmod(after - before, step)
                if rest or entries < 1:
                    raise ConfigError(
                        f"{title}: dimension {position} of {name} has {before} entries and {after} with {step} more"
                        f" units of {axis.name} ({axis.size} units), which is no whole number of entries for each;"
                        f" compute every size by multiplication and addition{_remedies(axis, step, after - before)}"
                    )
                found.setdefault((name, position), {})[axis.name] = entries
                reached = True
        if not reached:
            raise ConfigError(
                f"{title}: no parameter grows with axis {axis.name}; use the size the cut returns, or do not ask for it"
            )
    return found


def _larger(axis: Axis, build: Build, steps: Iterator[int]) -> tuple[int, Shapes]:
    """Build with the first step that can be built.

    Sizes of layers divide the axis, so a divisor of it is enough.
    """
    first: ConfigError | None = None
    for step in steps:
        try:
            return step, build({axis.name: step})
        except ConfigError as error:
            first = first or error
    raise ConfigError(
        f"{first} (with more units of axis {axis.name}: a builder must take other sizes than its own)"
    )


def _remedies(axis: Axis, step: int, entries: int) -> str:
    if axis.groups > 1:
        return ""
    units = step // math.gcd(step, entries)  # for which there is a whole number of entries
    said = ""
    if units > 1 and axis.size % units == 0:
        said = f", from a smaller one: cut.width({axis.name!r}, {axis.size // units}) * {units} is a size of {axis.size}"
    if step in (1, axis.size):
        return said
    return said + (
        f", and if a layer takes {axis.name} in {step} groups, cut inside them with cut.heads({axis.name!r}, {step},"
        f" {axis.size // step}) * {step} or whole ones with cut.groups({axis.name!r}, {step}) * {axis.size // step}"
    )


def _agrees(axes: Mapping[str, Axis], shapes: Shapes, found: Growth, build: Build) -> bool:
    """Whether all axes of twice the size move everything by what was found."""
    try:
        doubled = build({axis.name: axis.group_size for axis in axes.values()})
    except ConfigError:
        return True
    return all(
        doubled.get(name)
        == tuple(
            size
            + sum(
                entries * axes[axis].group_size
                for axis, entries in found.get((name, position), {}).items()
            )
            for position, size in enumerate(shape)
        )
        for name, shape in shapes.items()
    )


def _check(
    title: str,
    axes: Mapping[str, Axis],
    where: str,
    size: int,
    moved: Mapping[str, int],
) -> None:
    """Refuse a dimension that no concatenation of axes can be."""
    if sum(entries * axes[name].group_size for name, entries in moved.items()) > size:
        first, *others = moved
        with_whom = (
            f"with both {first} and {others[0]}"
            if others
            else f"by {moved[first]} with each unit of {first}"
        )
        raise ConfigError(
            f"{title}: {where} has {size} entries and grows {with_whom}, which is no concatenation; give each part a"
            " parameter of its own, and each factor of a product a dimension of its own"
        )
    for name, entries in moved.items():
        axis = axes[name]
        if axis.kind is AxisKind.FIXED and (len(moved) > 1 or entries * axis.size != size):
            raise ConfigError(
                f"{title}: {where} has {size} entries, {axis.size} of them for the labels {name}; keep what is joined"
                " to it in a parameter of its own"
            )
