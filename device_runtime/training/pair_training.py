"""Trains the two models of a pair on the same batches.

The losses are those of the paper, without a label mask. Orders and random numbers are those of
`device_runtime.training.schedule`; the own model's layers come before those of the sent model.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from device_runtime.training.backends import PairSession
from device_runtime.training.epochs import check_parameters
from device_runtime.training.hooks import EpochReport, Hooks
from device_runtime.training.labels import require_labels
from device_runtime.training.schedule import StepSeed, TrainingSchedule, draw_noise, training_batch
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.pair_manifest import SIDES, PairManifest, Side
from fleet_protocol.targets import counted


@dataclass(frozen=True)
class PairResult:
    """The result of training; the parameters and states stay in the session.

    Attributes:
        steps: number of steps of the training.
        losses: mean loss of each model in the last epoch, weighted by the labels that count.
        seconds: time of the training only.
    """

    steps: int
    losses: Mapping[Side, float]
    seconds: float


def train_pair(
    session: PairSession,
    manifest: PairManifest,
    schedule: TrainingSchedule,
    scalars: Mapping[str, float],
    hooks: Hooks,
) -> PairResult:
    """Train both models for the epochs or steps of an offer.

    Args:
        session: both models, and later the result.
        manifest: manifest of the pair.
        schedule: the samples, and their order.
        scalars: inputs of one number each, except the learning rate.
        hooks: are called with the loss of the sent model.

    Raises:
        TaskStopped: a hook requested it.
        DataError: no label of the training samples counts.
        RefusedError: a loss or a parameter is not finite.
    """
    require_labels(schedule.data, schedule.chosen)
    started = time.monotonic()
    step = 0
    means = np.full(len(SIDES), math.nan)
    for planned in schedule.passes():
        totals = np.zeros(len(SIDES))
        weight = 0
        for number, indices in enumerate(planned.batches):
            hooks.go_on()
            seed = schedule.step_seed(planned.epoch, number)
            x, y = training_batch(schedule.data, indices, manifest.sent.input_dtype, seed)
            inputs = {**scalars, "lr": schedule.settings.rate_at(step, schedule.steps)}
            losses = session.step(x, y, inputs, draw_noise(manifest.noise, seed, len(indices)))
            step += 1
            _check_losses(losses, seed, step)
            count = counted(y)
            totals = totals + np.array(losses) * count
            weight = weight + count
        means = totals / weight if weight else means
        sent_loss = float(means[SIDES.index("sent")])
        hooks.report(EpochReport(planned.epoch + 1, planned.epochs, step, sent_loss))
    for side in SIDES:
        check_parameters(session.parameters(side), schedule.round, step, f" of the {side} model")
    return PairResult(
        step,
        dict(zip(SIDES, map(float, means), strict=True)),
        time.monotonic() - started,
    )


def _check_losses(losses: tuple[float, ...], seed: StepSeed, step: int) -> None:
    """Raise a RefusedError if a loss is not finite."""
    if all(map(math.isfinite, losses)):
        return
    values = ", ".join(f"{loss} ({side})" for side, loss in zip(SIDES, losses, strict=True))
    raise RefusedError(
        RefusalReason.FAILED,
        f"the losses of the board's own model and the sent one are {values} in round "
        f"{seed.round} at step {step} (epoch {seed.epoch + 1}); lower the learning rate or "
        "examine the data",
    )
