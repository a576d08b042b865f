"""Records the losses of a device like `device_runtime.training.epochs.train`."""

import math

import numpy as np
from numpy.typing import NDArray

from device_runtime.training.epochs import TrainResult, loss_refused
from device_runtime.training.schedule import TrainingSchedule
from fleet_protocol.errors import ShoalError
from fleet_protocol.manifest import Manifest


class LossTally:
    """The losses of one device.

    Attributes:
        steps: done so far.
        failure: reason of a failed training; None while all losses are finite.
    """

    def __init__(self, schedule: TrainingSchedule, manifest: Manifest) -> None:
        self._schedule = schedule
        self._manifest = manifest
        self._last_mean = math.nan
        self._total = 0.0
        self._weight = 0.0
        self.steps = 0
        self.failure: ShoalError | None = None

    def add(
        self,
        epoch: int,
        losses: NDArray[np.float64],
        counts: NDArray[np.float64],
    ) -> None:
        """Add a pass over the samples.

        Args:
            epoch: number of the pass.
            losses: mean loss of each batch, ``[steps]``.
            counts: how many targets count in each batch, ``[steps]``.
        """
        refused = np.flatnonzero(~np.isfinite(losses))
        if len(refused) and self.failure is None:
            index = int(refused[0])
            step_seed = self._schedule.step_seed(epoch, index)
            step = self.steps + index + 1
            loss = float(losses[index])
            self.failure = loss_refused(loss, self._manifest, step_seed, step)
        self.steps += len(losses)
        total = float(losses @ counts)
        weight = float(counts.sum())
        # A pass with only ignored targets keeps the mean of the previous pass.
        if weight:
            self._last_mean = total / weight
        self._total = self._total + total
        self._weight = self._weight + weight

    def result(self, seconds: float) -> TrainResult:
        """Return the figures of the whole training with its duration."""
        mean = self._total / self._weight if self._weight else None
        return TrainResult(self.steps, self._last_mean, seconds, mean)
