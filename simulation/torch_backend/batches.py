"""Prepares batches of several virtual devices for one model, in stretches of equal shapes.

Each device has the order, batches and random numbers that `device_runtime.training.schedule` gives
it. Devices are sorted by their number of samples, so that the devices with remaining full batches
always come first: no device waits for a larger one, no step is masked, and a short last batch is a
separate stretch.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from device_runtime.training.schedule import (
    Indices,
    StepSeed,
    TrainingSchedule,
    draw_noise,
    training_batch,
)
from fleet_protocol.manifest import Manifest, NoiseSpec
from fleet_protocol.targets import Targets

ValueT = TypeVar("ValueT")

_PIECE_BYTES = 32 << 20
"""Number of samples and noise values to prepare at once."""


@dataclass(frozen=True)
class TorchJob:
    """The training of one virtual device in one round."""

    weights: Mapping[str, NDArray[np.float32]]
    schedule: TrainingSchedule


class EqualSteps(NamedTuple):
    """Steps of a pass over the samples in which the same devices have batches of the same size.

    Attributes:
        devices: which of the sorted devices.
        first: number of its first step within the pass.
        stop: number after its last step.
        size: samples of a batch.
    """

    devices: slice
    first: int
    stop: int
    size: int


def equal_steps(sizes: Sequence[Sequence[int]], batch_size: int) -> list[EqualSteps]:
    """Cut a pass over the samples into stretches.

    They contain every batch of every device once; batches of one device stay in order.

    Args:
        sizes: sizes of the batches of each device; all are full, except possibly the last.
        batch_size: samples of a full batch.
    """
    result: list[EqualSteps] = []
    # `sizes` is sorted, so devices of equal counts are neighbours.
    full_batches = [_count_full(device_sizes, batch_size) for device_sizes in sizes]
    lengths = set(full_batches) - {0}
    first = 0
    for stop in sorted(lengths):
        takes_part = [count >= stop for count in full_batches]
        for devices, do_take_part in _equal_neighbours(takes_part):
            if do_take_part:
                result.append(EqualSteps(devices, first, stop, batch_size))
        first = stop
    # Step and size of the last batch of each device, 0 where that batch is full.
    ends = []
    for count, device_sizes in zip(full_batches, sizes, strict=True):
        last_size = sum(device_sizes[count:])
        ends.append((count, last_size))
    for devices, (step, size) in _equal_neighbours(ends):
        if size:
            result.append(EqualSteps(devices, step, step + 1, size))
    return result


def _count_full(sizes: Sequence[int], batch_size: int) -> int:
    """Return the number of full batches."""
    return sum(size == batch_size for size in sizes)


def _equal_neighbours(values: Sequence[ValueT]) -> Iterator[tuple[slice, ValueT]]:
    """Yield slices of equal neighbours with their value."""
    start = 0
    for value, neighbours in itertools.groupby(values):
        stop = start + len(list(neighbours))
        yield slice(start, stop), value
        start = stop


@dataclass(frozen=True)
class BatchSequence:
    """Consecutive batches of some devices, ready for the model.

    Attributes:
        devices: which of the sorted devices, `k` of them.
        first: number of the first step within the pass.
        x: samples ``[k, steps, batch, ...]``.
        y: labels, int64 ``[k, steps, batch]`` or ``[k, steps, batch, tokens]``.
        noise: float32 ``[k, steps, batch, ...]`` for every noise layer of the manifest.
    """

    devices: slice
    first: int
    x: NDArray[Any]
    y: Targets
    noise: tuple[NDArray[np.float32], ...]


def batch_sequences(
    jobs: Sequence[TorchJob],
    plans: Sequence[Sequence[Indices]],
    epoch: int,
    manifest: Manifest,
    *,
    noise: bool = True,
) -> Iterator[BatchSequence]:
    """Yield the batches of a pass over the samples, some steps at a time.

    Args:
        jobs: jobs with the same batch size, the largest first.
        plans: for each job, the indices of every batch, as `TrainingSchedule.passes` gives
            them; empty for a finished job.
        epoch: number of the pass, from 0.
        manifest: manifest of the artifact set.
        noise: whether to draw the noise of the manifest's layers; not for statistics.
    """
    layers = manifest.noise if noise else ()
    numbers_per_sample = math.prod(manifest.input_shape)
    for spec in layers:
        numbers_per_sample += math.prod(spec.shape)
    sizes = []
    for plan in plans:
        sizes.append([len(indices) for indices in plan])
    for stretch in equal_steps(sizes, jobs[0].schedule.settings.batch_size):
        members = range(len(jobs))[stretch.devices]
        step_bytes = 4 * numbers_per_sample * stretch.size * len(members)
        most_steps = max(1, _PIECE_BYTES // step_bytes)
        for first in range(stretch.first, stretch.stop, most_steps):
            steps = range(first, min(first + most_steps, stretch.stop))
            by_device = []
            for member in members:
                schedule = jobs[member].schedule
                plan = plans[member][steps.start : steps.stop]
                seeds = [schedule.step_seed(epoch, step) for step in steps]
                by_device.append(_batches(schedule, plan, seeds, manifest.input_dtype, layers))
            yield _piece(stretch.devices, first, by_device)


def _piece(devices: slice, first: int, by_device: Sequence["_Batches"]) -> BatchSequence:
    """Stack the batches of several devices."""
    # An array of each device for every field.
    samples, labels, noise = zip(*by_device, strict=True)
    noise_by_layer = zip(*noise, strict=True)
    return BatchSequence(
        devices,
        first,
        x=_stacked(samples),
        y=_stacked(labels),
        noise=tuple(map(_stacked, noise_by_layer)),
    )


class _Batches(NamedTuple):
    """Samples, labels and noise of one device, each ``[steps, batch, ...]``."""

    x: NDArray[Any]
    y: Targets
    noise: tuple[NDArray[np.float32], ...]


def _batches(
    schedule: TrainingSchedule,
    plan: Sequence[Indices],
    step_seeds: Sequence[StepSeed],
    dtype: str,
    layers: Sequence[NoiseSpec],
) -> _Batches:
    """Return the batches of one device, all of the same size."""
    steps = len(plan)
    size = len(plan[0])
    if not schedule.data.augment:
        # The same as step by step in `training_batch`, at once.
        x, y = schedule.data.batch(np.concatenate(plan), dtype)
    else:
        step_samples = []
        step_labels: list[Any] = []
        for step_seed, indices in zip(step_seeds, plan, strict=True):
            samples, labels = training_batch(schedule.data, indices, dtype, step_seed)
            step_samples.append(samples)
            step_labels.append(labels)
        x = np.concatenate(step_samples)
        y = np.concatenate(step_labels)
    draws = [draw_noise(layers, step_seed, size) for step_seed in step_seeds]
    noise = []
    for spec in layers:
        noise_of_steps = [draw[spec.name] for draw in draws]
        noise.append(np.stack(noise_of_steps))
    samples_by_step = x.reshape(steps, size, *x.shape[1:])
    labels_by_step = y.reshape(steps, size, *y.shape[1:])
    return _Batches(samples_by_step, labels_by_step, tuple(noise))


def _stacked(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return arrays as rows of one; a single one is not copied."""
    if len(arrays) == 1:
        return arrays[0][None]
    return np.stack(arrays)
