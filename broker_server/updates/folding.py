"""Folds updates in the order of their devices' ids, in whatever order they arrive.

Addition of floats depends on its order; a fixed order gives the same bits in every run. An update
is folded as soon as all devices before it have answered, so little work is left at the close;
updates that have to wait do so on disk.

How an update counts is known only at the close, when all updates of its round are compared. So the
first update that will probably not count as it is, and all behind it, wait for the close as well.
The sums are made again only if an update that was not suspected counts differently.

The tensors of an update are read when it is folded or compared with others. An update that waits is
not read before: the intake has measured it.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from broker_server.stages.bounds import Measured
from broker_server.stages.moves import Move
from broker_server.stages.update import Update
from broker_server.store import TaskPhase
from broker_server.strategies.strategy import GlobalModel, Merge
from broker_server.updates.distance import measure

IsDoubtful = Callable[[Measured], bool]
Treatment = Callable[[Update], Update | None]
"""Returns an update as it counts; None if it does not."""


def _suspect_none(_measured: Measured) -> bool:
    return False


class Folding:
    """The merge of one round in progress, over tasks in the order of their devices.

    Attributes:
        folded: tasks whose updates are included, in their order.
        measured: the input of the screens, by task, in the order of the devices.
        load: returns an update of a task, whose tensors are read from the disk when they are used.
    """

    def __init__(
        self,
        merge: Merge[Any],
        order: Sequence[str],
        load: Callable[[str], Update],
        moves: Sequence[Move] = (),
        is_doubtful: IsDoubtful = _suspect_none,
    ) -> None:
        """Begin with empty sums.

        Args:
            merge: adds updates.
            order: tasks in the order of their devices' ids.
            load: see `Folding`.
            moves: move an update to the version into which it is folded, one after the other.
            is_doubtful: whether an update will probably not count as it is.
        """
        self._merge = merge
        self._order = tuple(order)
        self._moves = tuple(moves)
        self._is_doubtful = is_doubtful
        self.load = load
        self.measured: dict[str, Measured] = {}
        self._passed = 0  # number of tasks whose turn is over
        self._waiting: list[str] = []  # tasks that have arrived, from the first suspected one on
        self._opened: dict[str, Update] = {}  # updates that a screen compared, by task
        self._sums = merge.start()
        self.folded: list[str] = []

    def advance(self, phases: Mapping[str, TaskPhase]) -> None:
        """Fold the next updates in the order, given the phases of all tasks.

        Raises:
            BlobError: an update on disk can no longer be read.
        """
        for task in folded_prefix(self._order, phases, self._passed):
            if phases[task].arrived:
                # Measured before it is moved: screens judge the device's change.
                update = self.load(task)
                measured = _measured(update)
                self.measured[task] = measured
                if self._waiting or self._is_doubtful(measured):
                    self._waiting.append(task)
                else:
                    self._fold(task, update)
            self._passed += 1

    def open(self, task: str) -> Update:
        """Return an update that a screen compares with others, and keep it until it is folded.

        So its tensors are read once.
        """
        update = self._opened.get(task)
        if update is None:
            update = self.load(task)
            self._opened[task] = update
        return update

    def settle(self, treatments: Mapping[str, Treatment]) -> None:
        """Fold the updates that waited, once it is known how each counts.

        Args:
            treatments: treatments of the tasks whose updates do not count as they are.

        Raises:
            BlobError: an update on disk can no longer be read.
        """
        tasks = self._waiting
        if any(task in treatments for task in self.folded):
            tasks = self.folded + self._waiting
            self._sums = self._merge.start()
            self.folded = []
        self._waiting = []
        for task in tasks:
            # Treated before it is moved, because bounds apply to the change that the device made.
            update: Update | None = self._opened.pop(task, None) or self.load(task)
            if update is not None and task in treatments:
                update = treatments[task](update)
            if update is not None:
                self._fold(task, update)

    def _fold(self, task: str, update: Update) -> None:
        for move in self._moves:
            update = move(update)
        self._merge.fold(self._sums, update)
        self.folded.append(task)

    def finish(self, old: GlobalModel) -> GlobalModel:
        """Return the next global model after the old one; its arrays are those of the sums."""
        return self._merge.finish(self._sums, old)


def _measured(update: Update) -> Measured:
    distance = update.distance or measure(update.weights, update.sent())
    return Measured(
        tier=update.tier.id,
        norm=distance.norm,
        values=distance.values,
        declared=update.metrics.weight,
        announced=update.announced,
        device=update.device,
    )


def folded_prefix(
    order: Sequence[str],
    phases: Mapping[str, TaskPhase],
    passed: int,
) -> list[str]:
    """Return the next tasks in the order of the devices, up to the first unanswered one.

    Args:
        order: all tasks of a round.
        phases: phases of each of them.
        passed: number of tasks whose turn is over.

    Returns:
        Ids of tasks, including those without an update.
    """
    return list(itertools.takewhile(lambda task: phases[task].answered, order[passed:]))
