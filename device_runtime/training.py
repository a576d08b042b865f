"""What a device computes: epochs of training, evaluation on held-out samples, and a pass for batch norm statistics.

Nothing here knows the agent, MQTT or the disk. Every order is a function of numbers in the offer and of the number of
samples alone, so that a simulation reproduces a device bit by bit:

- ``holdout_split(n, share)``: a permutation of ``n`` from ``PCG64(SeedSequence([n]))``; its first ``round(share * n)``
  entries (at least one, at most ``n - 1``) are held out, both parts sorted. It is the same in every round, so no
  sample is ever both trained on and evaluated.
- ``sample_order(seed, round, epoch, n)``: a permutation of ``n`` from ``PCG64(SeedSequence([seed, round, epoch]))``,
  epochs from 0. Batches are consecutive pieces of it; a short last batch is kept (METHODS 1.3: local SGD over all
  batches).
- ``draw_noise(layers, seed, round, epoch, step, count)``: what the layers of a model draw at random in one step, from
  ``PCG64(SeedSequence([seed, round, epoch, step], spawn_key=(1,)))``: one generator for the layers in manifest order,
  ``random((count, *shape), float32)`` each; steps count from 0 within an epoch. Evaluation draws nothing.
- ``training_batch(...)``: the samples of a step. With ``augment`` in the board's ``[data]`` they are changed at random,
  by what `device_runtime.data.augment` draws from ``PCG64(SeedSequence([seed, round, epoch, step], spawn_key=(2,)))``.
- a statistics task takes the order of epoch 0 and drops a last batch of one sample, whose unbiased variance is
  undefined (METHODS 1.6). Its samples are those of the steps of a training with the same seed, changes included.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device_runtime.backends.session import ForwardSession, TrainSession
from device_runtime.data.augment import crop_flip
from device_runtime.data.dataset import DataSet
from fleet_protocol.errors import DataError, RefusalReason, RefusedError
from fleet_protocol.manifest import Manifest, NoiseSpec
from fleet_protocol.messages import Evaluation, TrainSettings

__all__ = [
    "EpochReport",
    "TaskStopped",
    "TrainResult",
    "batches",
    "check_measurable",
    "check_parameters",
    "counted_labels",
    "draw_noise",
    "evaluate",
    "holdout_split",
    "label_mask",
    "loss_refused",
    "mean_statistics",
    "measure",
    "passes",
    "present_labels",
    "sample_order",
    "self_test",
    "train",
    "training_batch",
    "training_mask",
]

Indices = NDArray[np.int64]
Statistics = dict[str, NDArray[np.float32]]
_SELF_TEST_SAMPLES = 2


class TaskStopped(Exception):  # noqa: N818 - no error: the agent asked for it
    """The agent no longer wants the result."""


@dataclass(frozen=True)
class EpochReport:
    """How far training is.

    Attributes:
        epoch: finished epochs.
        epochs: epochs in all.
        step: finished steps.
        loss: mean loss of the last finished epoch, weighted by the labels that count.
    """

    epoch: int
    epochs: int
    step: int
    loss: float


@dataclass(frozen=True)
class TrainResult:
    """What training ended with; the parameters stay in the session.

    Attributes:
        steps: steps done.
        loss: mean loss of the last epoch, weighted by the labels that count.
        seconds: time of the training alone.
        mean_loss: mean loss of all steps, weighted likewise; None if it is not known.
    """

    steps: int
    loss: float
    seconds: float
    mean_loss: float | None = None


def holdout_split(n: int, share: float) -> tuple[Indices, Indices]:
    """Which samples are trained on and which are held out (see the module's text).

    Args:
        n: samples in all.
        share: share to hold out, in [0, 1).

    Returns:
        Training and held-out indices, each sorted; with one sample, or share 0, nothing is held out.
    """
    held = min(max(1, round(share * n)), n - 1) if share > 0 else 0
    order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([n]))).permutation(n)
    return np.sort(order[held:]), np.sort(order[:held])


def sample_order(seed: int, round_number: int, epoch: int, n: int) -> Indices:
    """The order of the training samples in one epoch (see the module's text).

    Args:
        seed: of the offer.
        round_number: number of the round, from 1.
        epoch: from 0.
        n: training samples.

    Returns:
        A permutation of ``0 .. n - 1``.
    """
    sequence = np.random.SeedSequence([seed, round_number, epoch])
    return np.random.Generator(np.random.PCG64(sequence)).permutation(n)


def batches(order: Indices, batch_size: int) -> Iterator[Indices]:
    """Consecutive pieces of an order; the last may be shorter."""
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def passes(chosen: Indices, settings: TrainSettings, round_number: int) -> Iterator[tuple[int, int, list[Indices]]]:
    """The batches of a task, pass by pass.

    Args:
        chosen: indices of the training samples.
        settings: of the offer; with ``steps`` the last pass ends early, or there are more passes than ``epochs``.
        round_number: number of the round.

    Yields:
        Number of the pass from 0, number of passes in all, and the batches of this pass.
    """
    per_pass = math.ceil(len(chosen) / settings.batch_size)
    left = settings.steps or settings.epochs * per_pass
    count = math.ceil(left / per_pass)
    for epoch in range(count):
        order = chosen[sample_order(settings.seed, round_number, epoch, len(chosen))]
        yield epoch, count, list(batches(order, settings.batch_size))[: left - epoch * per_pass]


def draw_noise(
    layers: Sequence[NoiseSpec], seed: int, round_number: int, epoch: int, step: int, count: int
) -> dict[str, NDArray[np.float32]]:
    """The random numbers of one training step (see the module's text).

    Args:
        layers: of the manifest.
        seed: of the offer.
        round_number: number of the round, from 1.
        epoch: from 0.
        step: within the epoch, from 0.
        count: samples of the batch.

    Returns:
        Layer to float32 ``[count, *shape]``, uniform in [0, 1).
    """
    if not layers:
        return {}
    # The spawn key keeps the numbers apart from those of `sample_order`: [a, b, c] and [a, b, c, 0] seed alike.
    sequence = np.random.SeedSequence([seed, round_number, epoch, step], spawn_key=(1,))
    generator = np.random.Generator(np.random.PCG64(sequence))
    return {layer.name: generator.random((count, *layer.shape), np.float32) for layer in layers}


def training_batch(
    data: DataSet, indices: Indices, dtype: str, seed: int, round_number: int, epoch: int, step: int
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The samples and labels of one training step (see the module's text).

    Args:
        data: the board's samples.
        indices: of the batch, ``[B]``.
        dtype: ``float32`` or ``int64``, as the model takes samples.
        seed: of the offer.
        round_number: number of the round, from 1.
        epoch: from 0.
        step: within the epoch, from 0.

    Returns:
        Samples ``[B, ...]`` and labels ``[B]`` (or ``[B, T]``), both new arrays.
    """
    x, y = data.batch(indices, dtype)
    if data.augment == "none":
        return x, y
    sequence = np.random.SeedSequence([seed, round_number, epoch, step], spawn_key=(2,))
    return crop_flip(x, data.normal_black, np.random.Generator(np.random.PCG64(sequence))), y


def counted_labels(y: NDArray[np.int64]) -> int:
    """How many labels count: all but the negative ones."""
    return int(np.count_nonzero(y >= 0))


def present_labels(y: NDArray[np.int64]) -> NDArray[np.int64]:
    """The labels that occur, sorted; negative ones are none.

    Args:
        y: labels of some samples, ``[n]`` or ``[n, T]``.
    """
    found = np.unique(y)
    return found[found >= 0]


def label_mask(labels: NDArray[np.int64], classes: int, *, masked: bool) -> NDArray[np.float32]:
    """The label mask of METHODS 1.5.

    Args:
        labels: labels present in the training data.
        classes: labels of the model.
        masked: False lets every label count.

    Returns:
        ``[classes]``, 1 where the label counts.
    """
    mask = np.zeros(classes, np.float32) if masked else np.ones(classes, np.float32)
    mask[labels] = 1
    return mask


def self_test(session: TrainSession, manifest: Manifest) -> None:
    """One step on made-up weights and samples; a set that fails must not be used on this board.

    Args:
        session: of the set; its parameters are overwritten.
        manifest: of the set.

    Raises:
        RefusedError: the loss or a parameter is not finite.
    """
    draw = np.random.Generator(np.random.PCG64(0))
    session.load({p.name: draw.normal(0, 0.05, p.shape).astype(np.float32) for p in manifest.parameters})
    shape = (_SELF_TEST_SAMPLES, *manifest.input_shape)
    x: NDArray[Any] = np.zeros(shape, np.int64)  # token 0 exists in every vocabulary
    if manifest.input_dtype == "float32":
        x = draw.normal(size=shape).astype(np.float32)
    places = (_SELF_TEST_SAMPLES, *manifest.label_shape)
    y = np.arange(math.prod(places), dtype=np.int64).reshape(places) % manifest.classes
    noise = draw_noise(manifest.noise, 0, 0, 0, 0, _SELF_TEST_SAMPLES)
    loss = session.step(x, y, np.ones(manifest.classes, np.float32), 0.01, noise)
    broken = [name for name, value in session.parameters().items() if not np.isfinite(value).all()]
    if not math.isfinite(loss) or broken:
        what = f"loss {loss}" if not math.isfinite(loss) else f"parameter {broken[0]} not finite"
        raise RefusedError(
            RefusalReason.FAILED,
            f"artifact set {manifest.arch} {manifest.tier} fails its self-test on this board: {what} after one step",
        )


def train(
    session: TrainSession,
    manifest: Manifest,
    data: DataSet,
    chosen: Indices,
    settings: TrainSettings,
    round_number: int,
    *,
    report: Callable[[EpochReport], None],
    stopped: Callable[[], bool],
) -> TrainResult:
    """Train for the epochs or steps of an offer.

    Args:
        session: with the weights loaded; it holds the result.
        manifest: of the artifact set.
        data: the board's samples.
        chosen: indices of the training samples.
        settings: of the offer.
        round_number: number of the round.
        report: called after every epoch.
        stopped: asked before every step.

    Raises:
        TaskStopped: ``stopped`` said so.
        DataError: no label of the training samples counts.
        RefusedError: the loss or a parameter is not finite.
    """
    mask = training_mask(data, chosen, manifest.classes, masked=settings.mask_labels)
    started, step, mean = time.monotonic(), 0, math.nan
    all_total, all_weight = 0.0, 0
    for epoch, epochs, planned in passes(chosen, settings, round_number):
        total, weight = 0.0, 0
        for number, indices in enumerate(planned):
            if stopped():
                raise TaskStopped
            x, y = training_batch(data, indices, manifest.input_dtype, settings.seed, round_number, epoch, number)
            noise = draw_noise(manifest.noise, settings.seed, round_number, epoch, number, len(indices))
            loss = session.step(x, y, mask, settings.learning_rate, noise)
            step += 1
            if not math.isfinite(loss):
                raise loss_refused(loss, manifest, round_number, step, epoch)
            counted = counted_labels(y)
            total, weight = total + loss * counted, weight + counted
        mean = total / weight if weight else mean
        all_total, all_weight = all_total + total, all_weight + weight
        report(EpochReport(epoch + 1, epochs, step, mean))
    check_parameters(session.parameters(), round_number, step)
    seconds = time.monotonic() - started
    return TrainResult(step, mean, seconds, all_total / all_weight if all_weight else None)


def training_mask(data: DataSet, chosen: Indices, classes: int, *, masked: bool) -> NDArray[np.float32]:
    """The label mask of a training.

    Args:
        data: the board's samples.
        chosen: indices of the training samples.
        classes: labels of the model.
        masked: whether labels that do not occur are masked.

    Returns:
        ``[classes]``, 1 where the label counts.

    Raises:
        DataError: no label of the training samples counts.
    """
    if not counted_labels(data.y[chosen]):
        raise DataError(f"{data.source}: every label of the {len(chosen)} training samples is negative; none counts")
    return label_mask(present_labels(data.y[chosen]), classes, masked=masked)


def loss_refused(loss: float, manifest: Manifest, round_number: int, step: int, epoch: int) -> RefusedError:
    """The refusal of a task whose loss is not finite.

    Args:
        loss: what it is.
        manifest: of the artifact set.
        round_number: number of the round.
        step: of the task, from 1.
        epoch: from 0.
    """
    return RefusedError(
        RefusalReason.FAILED,
        f"the loss is {loss} in round {round_number} at step {step} (epoch {epoch + 1}) of "
        f"{manifest.arch} {manifest.tier}; lower the learning rate or look at the data",
    )


def check_parameters(parameters: Mapping[str, NDArray[np.float32]], round_number: int, step: int) -> None:
    """See that training left every parameter finite.

    Args:
        parameters: by name.
        round_number: number of the round.
        step: steps done.

    Raises:
        RefusedError: a parameter is not finite.
    """
    for name, value in parameters.items():
        if not np.isfinite(value).all():
            raise RefusedError(
                RefusalReason.FAILED,
                f"parameter {name} is not finite after round {round_number}, step {step}; lower the learning rate",
            )


def measure(
    session: ForwardSession,
    manifest: Manifest,
    data: DataSet,
    chosen: Indices,
    settings: TrainSettings,
    round_number: int,
    *,
    stopped: Callable[[], bool],
) -> tuple[Statistics, int]:
    """Batch norm statistics of a model on the board's training samples.

    Args:
        session: the statistics graph with its parameters.
        manifest: of the artifact set.
        data: the board's samples.
        chosen: indices of the training samples.
        settings: of the offer; batch size and seed count.
        round_number: number of the round.
        stopped: asked before every batch.

    Returns:
        ``stat.<norm>.mean`` and ``stat.<norm>.var`` as means over the batches, and the number of batches.

    Raises:
        TaskStopped: ``stopped`` said so.
        DataError: one sample only, whose unbiased variance does not exist.
        RefusedError: a statistic is not finite.
    """
    check_measurable(data, chosen, settings)
    order = chosen[sample_order(settings.seed, round_number, 0, len(chosen))]
    sums: dict[str, NDArray[np.float64]] = {}
    count = 0
    for number, indices in enumerate(batches(order, settings.batch_size)):
        if stopped():
            raise TaskStopped
        if len(indices) == 1:
            continue
        x, _ = training_batch(data, indices, manifest.input_dtype, settings.seed, round_number, 0, number)
        for name, value in session.statistics(x).items():
            sums[name] = sums[name] + value if name in sums else value.astype(np.float64)
        count += 1
    return mean_statistics(sums, count, round_number), count


def check_measurable(data: DataSet, chosen: Indices, settings: TrainSettings) -> None:
    """See that some samples have batch norm statistics.

    Raises:
        DataError: one sample only, whose unbiased variance does not exist.
    """
    if len(chosen) < 2 or settings.batch_size < 2:
        raise DataError(
            f"{data.source}: {len(chosen)} training samples in batches of {settings.batch_size} give no unbiased "
            "variance; batch norm statistics need two samples in a batch"
        )


def mean_statistics(sums: Mapping[str, NDArray[np.float64]], count: int, round_number: int) -> Statistics:
    """Batch norm statistics from their sums over the batches.

    Args:
        sums: float64 vectors by name.
        count: batches, at least 1.
        round_number: number of the round.

    Raises:
        RefusedError: a statistic is not finite.
    """
    statistics = {name: (value / count).astype(np.float32) for name, value in sums.items()}
    broken = [name for name, value in statistics.items() if not np.isfinite(value).all()]
    if broken:
        raise RefusedError(RefusalReason.FAILED, f"{broken[0]} is not finite in round {round_number}")
    return statistics


def evaluate(
    session: ForwardSession,
    manifest: Manifest,
    data: DataSet,
    chosen: Indices,
    batch_size: int,
    mask: NDArray[np.float32],
    statistics: Mapping[str, NDArray[np.float32]],
    *,
    stopped: Callable[[], bool],
) -> Evaluation:
    """Loss and accuracy on held-out samples.

    Args:
        session: the evaluation graph with its parameters.
        manifest: of the artifact set.
        data: the board's samples.
        chosen: indices of the held-out samples; at least one of their labels counts.
        batch_size: samples per batch.
        mask: label mask of the training.
        statistics: of the static batch norms.
        stopped: asked before every batch.

    Returns:
        Means over the labels that count, and their number: one per sample, or with a label per token those that are
        not negative.

    Raises:
        TaskStopped: ``stopped`` said so.
    """
    loss, correct, count = 0.0, 0, counted_labels(data.y[chosen])
    for indices in batches(chosen, batch_size):
        if stopped():
            raise TaskStopped
        x, y = data.batch(indices, manifest.input_dtype)
        batch_loss, batch_correct = session.evaluate(x, y, mask, statistics)
        loss, correct = loss + batch_loss, correct + batch_correct
    return Evaluation(examples=count, loss=loss / count, accuracy=correct / count)
