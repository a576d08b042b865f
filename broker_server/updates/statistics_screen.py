"""Compares the batch norm statistics of devices with each other, by the bounds for updates.

A version is evaluated with the statistics of devices. A device could otherwise make every version
look useless: by its values, or by a number of batches with which only its values count.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from broker_server.settings.robust import RobustConfig
from broker_server.stages.bounds import PEERS, Measured, Verdict, screen
from broker_server.stages.update import Tensors
from broker_server.store import TaskRecord


@dataclass(frozen=True)
class ReceivedStatistics:
    """The statistics of a device, as received.

    Attributes:
        task: its task.
        batches: batches over which they are means.
        tensors: the statistics by name.
    """

    task: TaskRecord
    batches: int
    tensors: Tensors

    def measured(self) -> Measured:
        """Return what the bounds compare; batches take the place of samples."""
        squares = 0.0
        values = 0
        for tensor in self.tensors.values():
            wide = np.asarray(tensor, np.float64)
            squares += float(np.vdot(wide, wide))
            values += wide.size
        task = self.task
        return Measured(
            task.tier, math.sqrt(squares), values, declared=self.batches, device=task.device
        )


def screen_statistics(
    received: Mapping[str, ReceivedStatistics], config: RobustConfig
) -> dict[str, Verdict]:
    """Judge the statistics of devices for one version.

    Args:
        received: the statistics by task.
        config: the bounds.

    Returns:
        A verdict for each task. `Verdict.screening` has the number of batches with which it counts,
        and a scale below 1 if it is clipped.
    """
    if len(received) < PEERS:
        # Two devices do not show which one is wrong.
        config = config.model_copy(update={"norm_bound": 0.0})
    measured = {name: answer.measured() for name, answer in received.items()}
    return screen(measured, {}, config)
