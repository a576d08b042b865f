"""Epochs in which two models are trained on the same batches: the board's own, and the one it was sent.

Orders and random numbers are those of `device_runtime.training.course`: ``training_batch`` and ``draw_noise``, the own
model's layers before the sent one's. There is no label mask.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from device_runtime.training.backends.pair import PairSession
from device_runtime.training.course import Course, draw_noise, training_batch
from device_runtime.training.epochs import check_parameters
from device_runtime.training.hooks import EpochReport, Hooks
from device_runtime.training.labels import require_labels
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.pair_manifest import SIDES, PairManifest, Side
from fleet_protocol.targets import counted


@dataclass(frozen=True)
class PairResult:
    """What training ended with; the parameters and states stay in the session."""

    steps: int
    losses: Mapping[Side, float]  # mean loss of each model in the last epoch, weighted by the labels that count
    seconds: float  # time of the training alone


def train_pair(
    session: PairSession, manifest: PairManifest, course: Course, scalars: Mapping[str, float], hooks: Hooks
) -> PairResult:
    """Train both models for the epochs or steps of an offer; hooks hear the loss of the sent model.

    Raises:
        TaskStopped: the hooks said so.
        DataError: no label of the training samples counts.
        RefusedError: a loss or a parameter is not finite.
    """
    require_labels(course.data, course.chosen)
    started, step, means = time.monotonic(), 0, np.full(len(SIDES), math.nan)
    for planned in course.passes():
        totals, weight = np.zeros(len(SIDES)), 0
        for number, indices in enumerate(planned.batches):
            hooks.go_on()
            moment = course.moment(planned.epoch, number)
            x, y = training_batch(course.data, indices, manifest.sent.input_dtype, moment)
            inputs = {**scalars, "lr": course.settings.rate_at(step, course.steps)}
            losses = session.step(x, y, inputs, draw_noise(manifest.noise, moment, len(indices)))
            step += 1
            if not all(map(math.isfinite, losses)):
                found = ", ".join(f"{loss} ({side})" for side, loss in zip(SIDES, losses, strict=True))
                raise RefusedError(
                    RefusalReason.FAILED,
                    f"the losses of the board's own model and the one it was sent are {found} in round {course.round}"
                    f" at step {step} (epoch {planned.epoch + 1}); lower the learning rate or look at the data",
                )
            count = counted(y)
            totals, weight = totals + np.array(losses) * count, weight + count
        means = totals / weight if weight else means
        hooks.report(EpochReport(planned.epoch + 1, planned.epochs, step, float(means[SIDES.index("sent")])))
    for side in SIDES:
        check_parameters(session.parameters(side), course.round, step, f" of the {side} model")
    return PairResult(step, dict(zip(SIDES, map(float, means), strict=True)), time.monotonic() - started)
