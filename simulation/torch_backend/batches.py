"""What a torch worker feeds its model: the batches of several virtual devices, in stretches of
equal shapes.

Each device has the order, the batches and the random numbers that `device_runtime.training.schedule`
gives it. Devices are sorted by their number of samples, so that in an epoch those that still have
full batches are always the first ones: nobody waits for a larger device, no step is masked out, and
a short last batch is a stretch of its own.
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

_PIECE_BYTES = 32 << 20  # of samples and noise that are prepared at once


@dataclass(frozen=True)
class TorchJob:
    """The training of one virtual device in one round."""

    weights: Mapping[str, NDArray[np.float32]]
    schedule: TrainingSchedule


class Stretch(NamedTuple):
    """Steps of a pass over the samples in which the same devices have batches of the same size."""

    devices: slice  # which of the sorted devices
    first: int  # number of its first step within the pass
    stop: int  # number behind its last step
    size: int


def stretches(sizes: Sequence[Sequence[int]], batch_size: int) -> list[Stretch]:
    """Cut a pass over the samples into stretches, by the sizes of each device's batches: all full
    but perhaps the last.

    They hold every batch of every device once, those of one device in their order.
    """
    found: list[Stretch] = []
    full = [sum(size == batch_size for size in device) for device in sizes]
    done = 0
    for steps in sorted(set(full) - {0}):
        for devices, takes_part in _runs([number >= steps for number in full]):
            if takes_part:
                found.append(Stretch(devices, done, steps, batch_size))
        done = steps
    ends = [(number, sum(device[number:])) for number, device in zip(full, sizes, strict=True)]
    for devices, (number, short) in _runs(ends):
        if short:
            found.append(Stretch(devices, number, number + 1, short))
    return found


def _runs(values: Sequence[ValueT]) -> Iterator[tuple[slice, ValueT]]:
    """Neighbours that are equal, as slices."""
    start = 0
    for value, alike in itertools.groupby(values):
        stop = start + sum(1 for _ in alike)
        yield slice(start, stop), value
        start = stop


@dataclass(frozen=True)
class Piece:
    """Consecutive batches of some devices, ready for the model."""

    devices: slice  # which of the sorted devices, `k` of them
    first: int  # number of the first step within the pass
    x: NDArray[Any]  # samples `[k, steps, batch, ...]`
    y: Targets  # labels, int64 `[k, steps, batch]` or `[k, steps, batch, tokens]`
    noise: tuple[
        NDArray[np.float32], ...
    ]  # float32 `[k, steps, batch, ...]` for every noise layer of the manifest


def pieces(
    jobs: Sequence[TorchJob],
    plans: Sequence[Sequence[Indices]],
    epoch: int,
    manifest: Manifest,
    *,
    noise: bool = True,
) -> Iterator[Piece]:
    """The batches of a pass over the samples, some steps at a time.

    Args:
        jobs: with the same batch size, the largest first.
        plans: of each job the indices of every batch, as `TrainingSchedule.passes`
            gives them; none of a job that has ended.
        epoch: number of the pass, from 0.
        manifest: of the artifact set.
        noise: whether to draw what the layers of the manifest need; not for statistics.
    """
    layers = manifest.noise if noise else ()
    numbers = math.prod(manifest.input_shape) + sum(math.prod(spec.shape) for spec in layers)
    sizes = [[len(indices) for indices in plan] for plan in plans]
    for stretch in stretches(sizes, jobs[0].schedule.settings.batch_size):
        members = range(len(jobs))[stretch.devices]
        most = max(1, _PIECE_BYTES // (4 * numbers * stretch.size * len(members)))
        for first in range(stretch.first, stretch.stop, most):
            steps = range(first, min(first + most, stretch.stop))
            parts = [
                _batches(
                    jobs[i].schedule,
                    plans[i][steps.start : steps.stop],
                    [jobs[i].schedule.step_seed(epoch, step) for step in steps],
                    manifest.input_dtype,
                    layers,
                )
                for i in members
            ]
            x = _stacked([part.x for part in parts])
            y = _stacked([part.y for part in parts])
            drawn = tuple(
                _stacked(list(arrays))
                for arrays in zip(*(part.noise for part in parts), strict=True)
            )
            yield Piece(stretch.devices, first, x, y, drawn)


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
    """Batches of equal size."""
    shape = (len(plan), len(plan[0]))
    if not schedule.data.augment:
        x, y = schedule.data.batch(
            np.concatenate(plan), dtype
        )  # at once what `training_batch` does step by step
    else:
        made = [
            training_batch(schedule.data, indices, dtype, step_seed)
            for step_seed, indices in zip(step_seeds, plan, strict=True)
        ]
        x = np.concatenate([x for x, _ in made])
        y = np.concatenate([y for _, y in made])
    draws = [draw_noise(layers, step_seed, shape[1]) for step_seed in step_seeds]
    noise = tuple(np.stack([draw[spec.name] for draw in draws]) for spec in layers)
    return _Batches(x.reshape(*shape, *x.shape[1:]), y.reshape(*shape, *y.shape[1:]), noise)


def _stacked(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0][None] if len(arrays) == 1 else np.stack(arrays)
