"""Folding updates in the order of their devices' ids, whatever the order they arrive in.

Addition of floats depends on its order; a fixed order gives the same bits in every run. An update is folded as soon as
everyone before it has answered, so at the close little is left to do; what has to wait waits on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker_server.collecting import folded_prefix
from broker_server.store import TaskPhase
from broker_server.strategies import Contribution, Strategy
from models.layout import Layout
from models.slicing import Tensors

__all__ = ["Folding"]

_WITH_UPDATE = frozenset({TaskPhase.RECEIVED, TaskPhase.MERGED})


class Folding:
    """The merge of one round in progress.

    Args:
        strategy: how to fold.
        layout: the global model.
        order: ids of the round's tasks, by device.
        load: reads the update of a task from disk.
    """

    def __init__(
        self, strategy: Strategy, layout: Layout, order: Sequence[str], load: Callable[[str], Contribution]
    ) -> None:
        self._strategy = strategy
        self._order = tuple(order)
        self._load = load
        self._done = 0
        self._state: Any = strategy.start(layout)
        self.folded: list[str] = []

    def advance(self, phases: Mapping[str, TaskPhase]) -> None:
        """Fold what is next in the order.

        Args:
            phases: of all tasks, by id.

        Raises:
            BlobError: an update on disk can no longer be read.
        """
        for task in folded_prefix(self._order, phases, self._done):
            if phases[task] in _WITH_UPDATE:
                self._strategy.fold(self._state, self._load(task))
                self.folded.append(task)
            self._done += 1

    def finish(self, old: Tensors) -> dict[str, NDArray[np.float32]]:
        """The merged weights; the accumulator's memory becomes theirs.

        Args:
            old: the weights the round started from.
        """
        return self._strategy.finish(self._state, old)
