"""Epochs of mutual learning on a device (METHODS 5.3): a personal model and a meme teach each other.

Orders and random numbers are those of `device_runtime.training`: ``training_batch`` and ``draw_noise``, the personal
model's layers before the meme's. There is no label mask: the losses are those of the paper.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from device_runtime.backends.mutual import MutualSession
from device_runtime.data.dataset import DataSet
from device_runtime.training import (
    EpochReport,
    Indices,
    TaskStopped,
    counted_labels,
    draw_noise,
    passes,
    training_batch,
)
from fleet_protocol.errors import DataError, RefusalReason, RefusedError
from fleet_protocol.messages import MutualSettings, TrainSettings
from fleet_protocol.mutual_manifest import SIDES, MutualManifest

__all__ = ["MutualResult", "train_mutual"]


@dataclass(frozen=True)
class MutualResult:
    """What training ended with; the parameters and states stay in the session.

    Attributes:
        steps: steps done.
        personal_loss: mean mutual loss of the personal model in the last epoch, weighted by the labels that count.
        meme_loss: that of the meme.
        seconds: time of the training alone.
    """

    steps: int
    personal_loss: float
    meme_loss: float
    seconds: float


def train_mutual(
    session: MutualSession,
    manifest: MutualManifest,
    data: DataSet,
    chosen: Indices,
    settings: TrainSettings,
    round_number: int,
    *,
    report: Callable[[EpochReport], None],
    stopped: Callable[[], bool],
) -> MutualResult:
    """Train both models for the epochs of an offer.

    Args:
        session: with the weights of both models loaded; it holds the result.
        manifest: of the mutual set.
        data: the board's samples.
        chosen: indices of the training samples.
        settings: of the offer; `MutualSettings` with its defaults where it has none.
        round_number: number of the round.
        report: called after every epoch, with the loss of the meme.
        stopped: asked before every step.

    Raises:
        TaskStopped: ``stopped`` said so.
        DataError: no label of the training samples counts.
        RefusedError: a loss or a parameter is not finite.
    """
    mutual = settings.mutual or MutualSettings()
    if not counted_labels(data.y[chosen]):
        raise DataError(f"{data.source}: every label of the {len(chosen)} training samples is negative; none counts")
    started, step, means = time.monotonic(), 0, np.full(len(SIDES), math.nan)
    for epoch, epochs, planned in passes(chosen, settings, round_number):
        totals, weight = np.zeros(len(SIDES)), 0
        for number, indices in enumerate(planned):
            if stopped():
                raise TaskStopped
            x, y = training_batch(data, indices, manifest.meme.input_dtype, settings.seed, round_number, epoch, number)
            noise = draw_noise(manifest.noise, settings.seed, round_number, epoch, number, len(indices))
            losses = session.step(x, y, mutual.alpha, mutual.beta, settings.learning_rate, noise)
            step += 1
            if not all(map(math.isfinite, losses)):
                raise RefusedError(
                    RefusalReason.FAILED,
                    f"the losses of the personal model and the meme are {losses} in round {round_number} at step "
                    f"{step} (epoch {epoch + 1}); lower the learning rate or look at the data",
                )
            counted = counted_labels(y)
            totals, weight = totals + np.array(losses) * counted, weight + counted
        means = totals / weight if weight else means
        report(EpochReport(epoch + 1, epochs, step, float(means[SIDES.index("meme")])))
    for side in SIDES:
        for name, value in session.parameters(side).items():
            if not np.isfinite(value).all():
                raise RefusedError(
                    RefusalReason.FAILED,
                    f"parameter {name} of the {side} model is not finite after round {round_number}, step {step}; "
                    "lower the learning rate",
                )
    personal, meme = (float(mean) for mean in means)
    return MutualResult(step, personal, meme, time.monotonic() - started)
