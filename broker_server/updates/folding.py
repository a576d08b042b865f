"""Folding updates in the order of their devices' ids, whatever the order they arrive in.

Addition of floats depends on its order; a fixed order gives the same bits in every run. An update
is folded as soon as everyone before it has answered, so at the close little is left to do; what has
to wait waits on disk.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from broker_server.store import TaskPhase
from broker_server.strategies.strategy import Contribution, GlobalModel, Merge
from broker_server.updates.bounds import Measured


class Folding:
    """The merge of one round in progress, over tasks in the order of their devices.

    An update is loaded from disk by its task, measured when it is folded for the first time, and
    moved where it was made from an earlier version.

    Attributes:
        folded: tasks whose updates are in it, in their order.
        measured: what was measured of the updates, by task.
    """

    def __init__(
        self,
        merge: Merge[Any],
        order: Sequence[str],
        load: Callable[[str], Contribution],
        measure: Callable[[str, Contribution], Measured] | None = None,
        moved: Callable[[str, Contribution], Contribution] = lambda _task, update: update,
    ) -> None:
        self._merge = merge
        self._order = tuple(order)
        self._measure = measure
        self._moved = moved
        self.load = load
        self.measured: dict[str, Measured] = {}
        self._done = 0
        self._sums = merge.start()
        self.folded: list[str] = []

    def advance(self, phases: Mapping[str, TaskPhase]) -> None:
        """Fold what is next in the order, given the phases of all tasks.

        Raises:
            BlobError: an update on disk can no longer be read.
        """
        for task in folded_prefix(self._order, phases, self._done):
            if phases[task].arrived:
                update = self.load(task)
                if self._measure is not None:
                    self.measured[task] = self._measure(task, update)
                self._merge.fold(self._sums, self._moved(task, update))
                self.folded.append(task)
            self._done += 1

    def again(self, treated: Callable[[str, Contribution], Contribution | None]) -> "Folding":
        """Fold the same updates anew, each as it is treated; None leaves it out.

        Raises:
            BlobError: an update on disk can no longer be read.
        """
        other = Folding(self._merge, (), self.load, moved=self._moved)
        for task in self.folded:
            update = treated(task, self.load(task))
            if update is not None:
                self._merge.fold(other._sums, self._moved(task, update))
                other.folded.append(task)
        return other

    def finish(self, old: GlobalModel) -> GlobalModel:
        """The next global model after the old one; the accumulator's memory becomes its."""
        return self._merge.finish(self._sums, old)


def folded_prefix(order: Sequence[str], phases: Mapping[str, TaskPhase], done: int) -> list[str]:
    """Return the next tasks in the order of the devices, up to the first that is not answered.

    Args:
        order: all tasks of a round.
        phases: where each of them is.
        done: how many were passed before.

    Returns:
        Ids of tasks, those without an update included.
    """
    return list(itertools.takewhile(lambda task: phases[task].answered, order[done:]))
