"""Look for other ways to ask for an axis with which the layout of a model holds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from models.axes import Axis
from models.dims import Dim
from models.zoo.growth import Growth
from models.zoo.proof import ProofTask, Refutation, prove_layout

_MOST_TRIALS = 16

IsAccepted = Callable[[Axis], bool]
"""Whether the architecture can be cut with another form of an axis, as its author would ask."""


def other_forms(task: ProofTask, axis: Axis, is_accepted: IsAccepted) -> Iterator[str]:
    """Yield calls of the cut that can replace the one for an axis.

    Where an axis lies in groups, a width can cut inside each of them, or leave out whole groups.
    """
    inside = _cut_inside_groups(task, axis, is_accepted)
    if inside is not None:
        yield inside
    whole = _cut_whole_groups(task, axis, is_accepted)
    if whole is not None:
        yield whole


def _numbers_of_groups(axis: Axis) -> list[int]:
    """List the numbers of groups that an axis can be split into, beyond those it has."""
    numbers: list[int] = []
    for number in range(axis.groups, axis.size, axis.groups):
        if number > 1 and axis.size % number == 0:
            numbers.append(number)
    return numbers


def _cut_inside_groups(task: ProofTask, axis: Axis, is_accepted: IsAccepted) -> str | None:
    for groups in _numbers_of_groups(axis)[:_MOST_TRIALS]:
        multiple = groups // axis.groups
        if multiple == 1:
            continue
        grouped = replace(axis, groups=groups, leading=False)
        form = _AxisForm(grouped, multiple, 1)
        if form.holds(task) and (axis.groups > 1 or is_accepted(grouped)):
            size = axis.size // groups
            return f"cut inside its groups: cut.heads({axis.name!r}, {groups}, {size}) * {groups}"
    return None


def _cut_whole_groups(task: ProofTask, axis: Axis, is_accepted: IsAccepted) -> str | None:
    numbers = [axis.groups]
    if axis.groups == 1:
        # The most groups first: the smaller a group, the closer a tier comes to its width.
        numbers = _numbers_of_groups(axis)[-_MOST_TRIALS:]
        numbers.reverse()
    for groups in numbers:
        size = axis.size // groups
        form = _AxisForm(Axis(axis.name, groups), size, axis.groups)
        if form.holds(task) and (axis.groups > 1 or is_accepted(form.axis)):
            return f"cut whole groups: cut.groups({axis.name!r}, {groups}) * {size}"
    return None


@dataclass(frozen=True)
class _AxisForm:
    """Another form of an axis, each of whose places has times / divisor the entries."""

    axis: Axis
    times: int
    divisor: int

    def holds(self, task: ProofTask) -> bool:
        """Return whether the layout of the whole model holds with this form of the axis."""
        name = self.axis.name
        whole = task.whole
        axes = {**whole.axes, name: self.axis}
        layout = prove_layout(ProofTask((replace(whole, axes=axes),), self._growth(task.growth)))
        if isinstance(layout, Refutation):
            return False
        # What had one entry for each unit has the entries of a whole group side by side, or those
        # of each place apart.
        old = whole.axes[name]
        single: set[Dim] = set()
        for (parameter, position), entries in task.growth.items():
            if entries == {name: old.groups}:
                single.add(layout.dims[parameter][position])
        inner = old.size // self.axis.size if self.axis.groups == 1 else 1
        # Where nothing has one entry for each unit, other parts of what lies in a group may change
        # places, as halves of heads, and look like it.
        return single == {Dim(name, inner)} or (not single and old.groups == 1)

    def _growth(self, growth: Growth) -> Growth:
        """Return what the axes of a model add when one has this form."""
        changed: Growth = {}
        for place, entries in growth.items():
            changed[place] = dict(entries)
            if self.axis.name in entries:
                changed[place][self.axis.name] *= self.times
                changed[place][self.axis.name] //= self.divisor
        return changed
