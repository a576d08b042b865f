"""Folding updates in the order of their devices' ids, whatever the order they arrive in.

Addition of floats depends on its order; a fixed order gives the same bits in every run. An update
is folded as soon as everyone before it has answered, so at the close little is left to do; what has
to wait waits on disk.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from broker_server.store import TaskPhase
from broker_server.strategies.strategy import GlobalModel, Merge
from broker_server.updates.bounds import Measured
from broker_server.updates.distance import measure
from broker_server.updates.values import Update

Move = Callable[[Update], Update]


class Folding:
    """The merge of one round in progress, over tasks in the order of their devices.

    Attributes:
        folded: tasks whose updates are in it, in their order.
        measured: what screens judge updates by, by task, taken when they were folded first.
        load: reads an update of a task from the disk.
    """

    def __init__(
        self,
        merge: Merge[Any],
        order: Sequence[str],
        load: Callable[[str], Update],
        move: Move = lambda update: update,
    ) -> None:
        """Begin with empty sums.

        Args:
            merge: adds updates up.
            order: tasks in the order of their devices' ids.
            load: see `Folding`.
            move: moves an update to the version that it is folded into.
        """
        self._merge = merge
        self._order = tuple(order)
        self._move = move
        self.load = load
        self.measured: dict[str, Measured] = {}
        self._passed = 0  # tasks of the order that have their turn behind them
        self._sums = merge.start()
        self.folded: list[str] = []

    def advance(self, phases: Mapping[str, TaskPhase]) -> None:
        """Fold what is next in the order, given the phases of all tasks.

        Raises:
            BlobError: an update on disk can no longer be read.
        """
        for task in folded_prefix(self._order, phases, self._passed):
            if phases[task].arrived:
                # Measured before it is moved: screens judge what the device has changed.
                update = self.load(task)
                self.measured[task] = _measured(update)
                self._fold(task, update)
            self._passed += 1

    def fold_again(self, treat: Callable[[str, Update], Update | None]) -> "Folding":
        """Fold the same updates into new sums, each as it is treated; None leaves it out.

        Raises:
            BlobError: an update on disk can no longer be read.
        """
        again = Folding(self._merge, (), self.load, self._move)
        for task in self.folded:
            # Treated before it is moved, as bounds are about the change that the device made.
            update = treat(task, self.load(task))
            if update is not None:
                again._fold(task, update)
        return again

    def _fold(self, task: str, update: Update) -> None:
        self._merge.fold(self._sums, self._move(update))
        self.folded.append(task)

    def finish(self, old: GlobalModel) -> GlobalModel:
        """Return the next global model after the old one, whose arrays are those of the sums."""
        return self._merge.finish(self._sums, old)


def _measured(update: Update) -> Measured:
    distance = update.distance or measure(update.weights, update.sent())
    return Measured(
        tier=update.task.tier,
        norm=distance.norm,
        values=distance.values,
        declared=update.metrics.examples,
        announced=update.announced,
        device=update.device,
    )


def folded_prefix(
    order: Sequence[str],
    phases: Mapping[str, TaskPhase],
    passed: int,
) -> list[str]:
    """Return the next tasks in the order of the devices, up to the first that is not answered.

    Args:
        order: all tasks of a round.
        phases: where each of them is.
        passed: how many had their turn before.

    Returns:
        Ids of tasks, those without an update included.
    """
    return list(itertools.takewhile(lambda task: phases[task].answered, order[passed:]))
