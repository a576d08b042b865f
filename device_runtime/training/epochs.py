"""Local training on a board: epochs of steps, and the test of a new graph before the first.

Nothing here depends on the agent, MQTT or the disk.
"""

import itertools
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.training.backends.session import TrainSession
from device_runtime.training.hooks import EpochReport, Hooks
from device_runtime.training.labels import training_mask
from device_runtime.training.schedule import StepSeed, TrainingSchedule, draw_noise, training_batch
from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.manifest import Manifest
from fleet_protocol.targets import Targets, counted

_SELF_TEST_SAMPLES = 2
_DRAWN_AT_ONCE = 65_536
"""Synthetic numbers, in float64 before they are rounded."""
_SPREAD_OF_SCALES = 0.05
"""Standard deviation of synthetic scales and offsets, whose mean is 1."""


@dataclass(frozen=True)
class TrainResult:
    """The result of training; the parameters stay in the session.

    Attributes:
        steps: number of steps of the training.
        loss: mean of the last epoch, weighted by the labels that count.
        seconds: time of the training only.
        mean_loss: mean loss of all steps, weighted likewise; None if it is not known.
    """

    steps: int
    loss: float
    seconds: float
    mean_loss: float | None = None


def train(
    session: TrainSession,
    manifest: Manifest,
    schedule: TrainingSchedule,
    hooks: Hooks,
) -> TrainResult:
    """Train for the epochs or steps of an offer.

    Args:
        session: has the weights, and later the result.
        manifest: manifest of the artifact set.
        schedule: the samples, and their order.
        hooks: are called after every epoch.

    Raises:
        TaskStopped: a hook requested it.
        DataError: no label of the training samples counts.
        RefusedError: the loss or a parameter is not finite.
    """
    data = schedule.data
    settings = schedule.settings
    mask = training_mask(data, schedule.chosen, manifest.classes, masked=settings.mask_labels)
    started = time.monotonic()
    step = 0
    mean = math.nan
    all_total = 0.0
    all_weight = 0
    keeping = session.keeping(
        settings.batch_size,
        len(schedule.chosen),
        again=schedule.steps * settings.batch_size > len(schedule.chosen),
        is_random=bool(data.augment),
    )
    with keeping:
        for planned in schedule.passes():
            total = 0.0
            weight = 0
            for number, indices in enumerate(planned.batches):
                hooks.go_on()
                step_seed = schedule.step_seed(planned.epoch, number)
                x, y = training_batch(data, indices, manifest.input_dtype, step_seed)
                noise = draw_noise(manifest.noise, step_seed, len(indices))
                loss = session.step(x, y, mask, settings.rate_at(step, schedule.steps), noise)
                step += 1
                # Immediately: all further training would be lost, and hours of it on a slow board.
                if not math.isfinite(loss):
                    raise loss_refused(loss, manifest, step_seed, step)
                count = counted(y)
                total = total + loss * count
                weight = weight + count
            mean = total / weight if weight else mean
            all_total = all_total + total
            all_weight = all_weight + weight
            hooks.report(EpochReport(planned.epoch + 1, planned.epochs, step, mean))
    # The loss precedes the last step, which may have spoilt the parameters that are sent.
    check_parameters(session.parameters(), schedule.round, step)
    mean_loss = all_total / all_weight if all_weight else None
    return TrainResult(step, mean, time.monotonic() - started, mean_loss)


def loss_refused(
    loss: float,
    manifest: Manifest,
    step_seed: StepSeed,
    step: int,
) -> RefusedError:
    """Return the refusal of a task whose loss is not finite."""
    return RefusedError(
        RefusalReason.FAILED,
        f"the loss is {loss} in round {step_seed.round} at step {step} (epoch "
        f"{step_seed.epoch + 1}) of {manifest.arch} {manifest.tier}; lower the learning rate "
        "or examine the data",
    )


def check_parameters(
    parameters: Mapping[str, NDArray[np.float32]],
    round_number: int,
    step: int,
    whose: str = "",
) -> None:
    """Check that every parameter is finite after training.

    Args:
        parameters: the parameters by name.
        round_number: number of the round, for the message, like the step and `whose`.
        step: number of the last step.
        whose: empty if there is only one model.

    Raises:
        RefusedError: a parameter is not finite.
    """
    for name, value in parameters.items():
        if not np.isfinite(value).all():
            raise RefusedError(
                RefusalReason.FAILED,
                f"parameter {name}{whose} is not finite after round {round_number}, step {step}; "
                "lower the learning rate",
            )


def made_up_steps(session: TrainSession, manifest: Manifest, count: int) -> Iterator[float]:
    """Yield the losses of endless steps on synthetic samples, from synthetic weights.

    Both are always the same.

    Args:
        session: session whose parameters are overwritten.
        manifest: manifest of the artifact set.
        count: samples of a step.
    """
    draw = np.random.Generator(np.random.PCG64(0))
    _make_up_weights(session, manifest, draw)
    session.anchor(0.0)
    shape = (count, *manifest.input_shape)
    places = (count, *manifest.label_shape)
    x: NDArray[Any] = np.zeros(shape, np.int64)  # token 0 exists in every vocabulary
    y: Targets = np.arange(math.prod(places), dtype=np.int64).reshape(places) % manifest.classes
    for step in itertools.count():
        if manifest.input_dtype == "float32":
            x = draw.random(shape, np.float32)  # token 0 in a row of tokens, too
        if manifest.recipe.loss.target == "float32":
            y = draw.random(places, np.float32)  # in [0, 1), which is valid for every loss
        noise = draw_noise(manifest.noise, StepSeed(0, 0, 0, step), count)
        yield session.step(x, y, np.ones(manifest.classes, np.float32), 0.01, noise)


def _make_up_weights(session: TrainSession, manifest: Manifest, draw: np.random.Generator) -> None:
    """Draw synthetic weights, with which rounding errors stay small in deep networks.

    Matrices and kernels have the deviation of He et al. (https://arxiv.org/abs/1502.01852), which
    keeps the size of activations from layer to layer. Scales and offsets are near 1: with scales
    near 0, rounding errors grow within five steps to half of the parameters' change (MobileNetV2).
    """
    # In place and in pieces: a second copy of the model could exceed the memory of a board.
    buffers = session.reset()
    for parameter in manifest.parameters:
        inputs_of_unit = math.prod(parameter.shape[1:])
        is_matrix = len(parameter.shape) > 1
        mean = 0.0 if is_matrix else 1.0
        deviation = math.sqrt(2 / inputs_of_unit) if is_matrix else _SPREAD_OF_SCALES
        numbers = buffers[parameter.name].reshape(-1)
        for start in range(0, numbers.size, _DRAWN_AT_ONCE):
            piece = numbers[start : start + _DRAWN_AT_ONCE]
            piece[...] = draw.normal(mean, deviation, piece.size)


def self_test(session: TrainSession, manifest: Manifest) -> None:
    """Take one step on synthetic weights and samples.

    A set that fails must not be used on this board. The parameters of the session are overwritten.

    Raises:
        RefusedError: the loss or a parameter is not finite.
    """
    loss = next(made_up_steps(session, manifest, _SELF_TEST_SAMPLES))
    broken = [name for name, value in session.parameters().items() if not np.isfinite(value).all()]
    if not math.isfinite(loss) or broken:
        loss_is_finite = math.isfinite(loss)
        fault = f"parameter {broken[0]} not finite" if loss_is_finite else f"loss {loss}"
        raise RefusedError(
            RefusalReason.FAILED,
            f"artifact set {manifest.arch} {manifest.tier} fails its self-test on this "
            f"board: {fault} after one step",
        )
