"""Searches for other requests for an axis that give a valid layout.

A remedy is tried before it is named. Trying one builds and proves the model once more, so the
search has a bound of processor time.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from models.axes import Axis, AxisKind
from models.cut import Cut
from models.dims import Dim
from models.zoo.builds import ModelBuilder
from models.zoo.growth import Growth
from models.zoo.proof import ProofTask, Refutation, prove_layout
from models.zoo.randomized_model import TimeUpError

_MOST_TRIALS = 16
_SECONDS = 12.0
"""Processor time for all trials of a refusal; what is not tried by then is not named."""


@dataclass(frozen=True)
class Trials:
    """Tries remedies on the builder of a model."""

    builder: ModelBuilder
    is_accepted: Callable[[ModelBuilder], bool]  # whether a builder has a layout
    deadline: float = field(default_factory=lambda: time.process_time() + _SECONDS)

    @property
    def is_over(self) -> bool:
        """Return whether the time for trials is up."""
        return time.process_time() > self.deadline

    def accepts(self, axis: Axis) -> bool:
        """Return whether the model can be cut with another form of an axis."""
        return self._holds(lambda cut: cut.declare(axis))

    def accepts_joined(self, axes: Sequence[Axis], axis: Axis) -> bool:
        """Return whether the model can be cut if some axes are the same as another one."""
        names = [joined.name for joined in axes]
        return self._holds(lambda cut: cut.join(names, axis.name))

    def _holds(self, change: Callable[[Cut], None]) -> bool:
        if self.is_over:
            return False
        arch = self.builder.arch

        def build(cut: Cut, **settings: Any) -> Any:
            change(cut)
            return arch.build(cut, **settings)

        changed = replace(self.builder, arch=replace(arch, build=build), until=self.deadline)
        return self.is_accepted(changed)


def one_name(task: ProofTask, axis: Axis, trials: Trials) -> str:
    """Return the advice to give axes of one size one name; "" if that does not help.

    Layers whose outputs are added must have the same units in the same order.
    """
    alike: list[Axis] = []
    for candidate in task.dimensions.axes.values():
        if candidate.kind is AxisKind.WIDTH and replace(candidate, name=axis.name) == axis:
            alike.append(candidate)
    alike.remove(axis)
    pairs = [[candidate] for candidate in alike]
    for axes in [*pairs, alike] if len(alike) > 1 else pairs:
        if trials.accepts_joined(axes, axis):
            names = ", ".join(repr(joined.name) for joined in axes)
            return (
                f"their units are those of {names} as well, as where a residual adds layers: name"
                f" all of them {axis.name!r} in the requests of the cut"
            )
    return ""


def other_forms(task: ProofTask, axis: Axis, trials: Trials) -> Iterator[str]:
    """Yield calls of the cut that can replace the one for an axis.

    If an axis consists of groups, a width can cut inside each of them, or omit whole groups.
    """
    inside = _cut_inside_groups(task, axis, trials)
    if inside is not None:
        yield inside
    whole = _cut_whole_groups(task, axis, trials)
    if whole is not None:
        yield whole


def _numbers_of_groups(axis: Axis) -> list[int]:
    """List the numbers of groups that an axis can be split into, beyond those it has."""
    numbers: list[int] = []
    for number in range(axis.groups, axis.size, axis.groups):
        if number > 1 and axis.size % number == 0:
            numbers.append(number)
    return numbers


def _cut_inside_groups(task: ProofTask, axis: Axis, trials: Trials) -> str | None:
    for groups in _numbers_of_groups(axis)[:_MOST_TRIALS]:
        multiple = groups // axis.groups
        if multiple == 1:
            continue
        grouped = replace(axis, groups=groups, leading=False)
        form = _AxisForm(grouped, multiple, 1)
        if trials.is_over:
            return None
        if form.holds(task, trials.deadline) and (axis.groups > 1 or trials.accepts(grouped)):
            size = axis.size // groups
            return f"cut inside its groups: cut.heads({axis.name!r}, {groups}, {size}) * {groups}"
    return None


def _cut_whole_groups(task: ProofTask, axis: Axis, trials: Trials) -> str | None:
    numbers = [axis.groups]
    if axis.groups == 1:
        # The most groups first: the smaller a group, the closer a tier comes to its width.
        numbers = _numbers_of_groups(axis)[-_MOST_TRIALS:]
        numbers.reverse()
    for groups in numbers:
        size = axis.size // groups
        form = _AxisForm(Axis(axis.name, groups), size, axis.groups)
        if trials.is_over:
            return None
        if form.holds(task, trials.deadline) and (axis.groups > 1 or trials.accepts(form.axis)):
            return f"cut whole groups: cut.groups({axis.name!r}, {groups}) * {size}"
    return None


@dataclass(frozen=True)
class _AxisForm:
    """Another form of an axis, each of whose places has times / divisor the entries."""

    axis: Axis
    times: int
    divisor: int

    def holds(self, task: ProofTask, until: float) -> bool:
        """Return whether the layout of the whole model holds with this form of the axis.

        Args:
            task: the proof that the usual form failed.
            until: processor time after which the form counts as refuted.
        """
        name = self.axis.name
        whole = task.whole
        axes = {**whole.axes, name: self.axis}
        variant = replace(whole, axes=axes, model=replace(whole.model, until=until))
        try:
            layout = prove_layout(ProofTask((variant,), self._growth(task.growth)))
        except TimeUpError:
            return False
        if isinstance(layout, Refutation):
            return False
        # Dimensions with one entry for each unit now have the entries of a whole group side by
        # side, or those of each place apart.
        old = whole.axes[name]
        single: set[Dim] = set()
        for (parameter, position), entries in task.growth.items():
            if entries == {name: old.groups}:
                single.add(layout.dims[parameter][position])
        inner = old.size // self.axis.size if self.axis.groups == 1 else 1
        # If no dimension has one entry for each unit, other parts of a group, such as halves of
        # heads, may change places and look the same.
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
