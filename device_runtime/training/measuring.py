"""Measures a model without changing it: batch norm statistics, and its accuracy.

The accuracy is that on held-out samples.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from device_runtime.training.backends.forward import ForwardSession
from device_runtime.training.hooks import Hooks
from device_runtime.training.schedule import Indices, TrainingSchedule, batches, training_batch
from fleet_protocol.data.dataset import DataSet
from fleet_protocol.errors import DataError, RefusalReason, RefusedError
from fleet_protocol.graph_parts import exit_keys
from fleet_protocol.manifest import Manifest
from fleet_protocol.messages import Evaluation
from fleet_protocol.metrics import evaluation_of
from fleet_protocol.targets import counted

Statistics = dict[str, NDArray[np.float32]]
EVAL = "onnx/eval"
STATS = "onnx/stats"
INFER = "onnx/infer"


def graphs_of_prediction(manifest: Manifest) -> tuple[str, ...]:
    """Return the keys of the graphs that predict, of those that a set has."""
    keys = (STATS, INFER, *exit_keys(manifest.graphs))
    return tuple(key for key in keys if key in manifest.graphs)


@dataclass(frozen=True)
class HeldOut:
    """Samples on which a model is evaluated.

    Attributes:
        data: all samples of the board.
        chosen: indices of the held-out samples.
        batch_size: number of samples evaluated at once.
        mask: label mask of the training, ``[classes]``.
        statistics: statistics of the model's static batch norms.
    """

    data: DataSet
    chosen: Indices
    batch_size: int
    mask: NDArray[np.float32]
    statistics: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)


def measure(
    session: ForwardSession,
    manifest: Manifest,
    schedule: TrainingSchedule,
    hooks: Hooks,
) -> tuple[Statistics, int]:
    """Measure the batch norm statistics of a model on the board's training samples.

    Their batches are those of the schedule's first pass.

    Returns:
        ``stat.<norm>.mean`` and ``stat.<norm>.var`` as means over the batches, and the number of
        batches.

    Raises:
        TaskStopped: a hook requested it.
        DataError: there is only one sample, which has no unbiased variance.
        RefusedError: a statistic is not finite.
    """
    check_measurable(schedule)
    sums: dict[str, NDArray[np.float64]] = {}
    count = 0
    for number, indices in enumerate(batches(schedule.order(), schedule.settings.batch_size)):
        hooks.go_on()
        # One sample has no unbiased variance.
        if len(indices) == 1:
            continue
        x, _ = training_batch(
            schedule.data, indices, manifest.input_dtype, schedule.step_seed(0, number)
        )
        # Sums in float64: many batches in float32 would lose what the last ones add.
        for name, value in session.statistics(x).items():
            sums[name] = sums[name] + value if name in sums else value.astype(np.float64)
        count += 1
    return mean_statistics(sums, count, schedule.round), count


def check_measurable(schedule: TrainingSchedule) -> None:
    """Check that samples have batch norm statistics.

    Raises:
        DataError: no batch has two samples, so there is no unbiased variance.
    """
    if not schedule.measurable:
        raise DataError(
            f"{schedule.data.source}: {len(schedule.chosen)} training samples in batches of "
            f"{schedule.settings.batch_size} give no unbiased variance; "
            "batch norm statistics need two samples in a batch"
        )


def mean_statistics(
    sums: Mapping[str, NDArray[np.float64]], count: int, round_number: int
) -> Statistics:
    """Return batch norm statistics from their sums over `count` batches, at least 1.

    Raises:
        RefusedError: one is not finite.
    """
    statistics = {name: (value / count).astype(np.float32) for name, value in sums.items()}
    broken = [name for name, value in statistics.items() if not np.isfinite(value).all()]
    if broken:
        raise RefusedError(
            RefusalReason.FAILED, f"{broken[0]} is not finite in round {round_number}"
        )
    return statistics


def evaluate(
    session: ForwardSession,
    manifest: Manifest,
    held_out: HeldOut,
    hooks: Hooks,
) -> Evaluation:
    """Return loss and accuracy on held-out samples; at least one label must count.

    They are means over the labels that count: one per sample or, with a label per token, those that
    are not negative.

    Raises:
        TaskStopped: a hook requested it.
    """
    data = held_out.data
    chosen = held_out.chosen
    sums: dict[str, NDArray[np.float64]] = {}
    for indices in batches(chosen, held_out.batch_size):
        hooks.go_on()
        x, y = data.batch(indices, manifest.input_dtype)
        for name, value in session.evaluate(x, y, held_out.mask, held_out.statistics).items():
            sums[name] = sums[name] + value if name in sums else value
    return evaluation_of(sums, counted(data.y[chosen]), manifest.recipe)


def judge(
    open_graph: Callable[[str], ForwardSession],
    manifest: Manifest,
    schedule: TrainingSchedule,
    held_out: HeldOut,
    hooks: Hooks,
) -> Evaluation | None:
    """Return loss and accuracy of a model on held-out samples.

    Its norms use the board's own statistics.

    Args:
        open_graph: opens a graph of the model by its key.
        manifest: manifest of the model.
        schedule: schedule of the training samples, for the statistics.
        held_out: the samples for the evaluation.
        hooks: may stop it.

    Returns:
        None if no held-out label counts, the set has no evaluation graph, or the statistics
        cannot be measured.

    Raises:
        TaskStopped: a hook requested it.
        RefusedError: a statistic is not finite.
    """
    # A mean over no label would be NaN, which no message can carry.
    if EVAL not in manifest.graphs or not counted(held_out.data.y[held_out.chosen]):
        return None
    statistics: Statistics = {}
    if manifest.statistics:
        if not schedule.measurable:
            return None
        statistics, _batches = measure(open_graph(STATS), manifest, schedule, hooks)
    samples = replace(held_out, statistics=statistics)
    return evaluate(open_graph(EVAL), manifest, samples, hooks)
