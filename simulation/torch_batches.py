"""What a torch worker feeds its model: the batches of several virtual devices, in stretches of equal shapes.

Each device has the order, the batches and the random numbers that `device_runtime.training` gives it. Devices are
sorted by their number of samples, so that those that still have full batches are always the first ones: nobody waits
for a larger device, no step is masked out, and a short last batch is a stretch of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from device_runtime.data.dataset import DataSet
from device_runtime.training import Indices, draw_noise, sample_order
from fleet_protocol.manifest import Manifest, NoiseSpec
from fleet_protocol.messages import TrainSettings

__all__ = ["Piece", "Stretch", "TorchJob", "pieces", "stretches"]

_PIECE_BYTES = 32 << 20  # of samples and noise that are prepared at once


@dataclass(frozen=True)
class TorchJob:
    """The training of one virtual device in one round.

    Attributes:
        weights: float32 arrays by parameter name.
        data: the device's samples.
        chosen: indices of those it trains on.
        settings: of the offer.
        round: number of the round, from 1.
    """

    weights: Mapping[str, NDArray[np.float32]]
    data: DataSet
    chosen: Indices
    settings: TrainSettings
    round: int


class Stretch(NamedTuple):
    """Steps of an epoch in which the same devices have batches of the same size.

    Attributes:
        devices: which of the sorted devices.
        first: number of its first step within the epoch.
        stop: number behind its last step.
        size: samples of each batch.
    """

    devices: slice
    first: int
    stop: int
    size: int


def stretches(counts: Sequence[int], batch_size: int) -> list[Stretch]:
    """Cut an epoch into stretches.

    Args:
        counts: samples of each device, the largest first.
        batch_size: samples per step.

    Returns:
        Stretches that hold every batch of every device once, those of one device in their order.
    """
    found: list[Stretch] = []
    full = [count // batch_size for count in counts]
    done = 0
    for steps in sorted(set(full) - {0}):
        holders = sum(number >= steps for number in full)
        found.append(Stretch(slice(0, holders), done, steps, batch_size))
        done = steps
    start = 0
    for count, alike in itertools.groupby(counts):
        stop = start + len(list(alike))
        if count % batch_size:
            short = Stretch(slice(start, stop), count // batch_size, count // batch_size + 1, count % batch_size)
            found.append(short)
        start = stop
    return found


@dataclass(frozen=True)
class Piece:
    """Consecutive batches of some devices, ready for the model.

    Attributes:
        devices: which of the sorted devices, ``k`` of them.
        first: number of the first step within the epoch.
        x: samples ``[k, steps, batch, ...]``.
        y: labels, int64 ``[k, steps, batch]`` or ``[k, steps, batch, tokens]``.
        noise: float32 ``[k, steps, batch, ...]`` for every noise layer of the manifest.
    """

    devices: slice
    first: int
    x: NDArray[Any]
    y: NDArray[np.int64]
    noise: tuple[NDArray[np.float32], ...]


def pieces(jobs: Sequence[TorchJob], epoch: int, manifest: Manifest, *, noise: bool = True) -> Iterator[Piece]:
    """The batches of an epoch, a few at a time.

    Args:
        jobs: with the same batch size, the largest first.
        epoch: from 0.
        manifest: of the artifact set.
        noise: whether to draw what the layers of the manifest need; not for statistics.
    """
    layers = manifest.noise if noise else ()
    batch_size = jobs[0].settings.batch_size
    counts = [len(job.chosen) for job in jobs]
    orders = [job.chosen[sample_order(job.settings.seed, job.round, epoch, len(job.chosen))] for job in jobs]
    numbers = math.prod(manifest.input_shape) + sum(math.prod(spec.shape) for spec in layers)
    for stretch in stretches(counts, batch_size):
        members = range(len(jobs))[stretch.devices]
        most = max(1, _PIECE_BYTES // (4 * numbers * stretch.size * len(members)))
        for first in range(stretch.first, stretch.stop, most):
            steps = range(first, min(first + most, stretch.stop))
            # Every batch before these was full, a short one's own included.
            start = first * batch_size
            stop = start + len(steps) * stretch.size
            shape = (len(steps), stretch.size)
            parts = [
                _batches(jobs[i], orders[i][start:stop], epoch, steps, shape, manifest.input_dtype, layers)
                for i in members
            ]
            x, y = _stacked([part.x for part in parts]), _stacked([part.y for part in parts])
            drawn = tuple(_stacked(list(arrays)) for arrays in zip(*(part.noise for part in parts), strict=True))
            yield Piece(stretch.devices, first, x, y, drawn)


class _Batches(NamedTuple):
    """Samples, labels and noise of one device, each ``[steps, batch, ...]``."""

    x: NDArray[Any]
    y: NDArray[np.int64]
    noise: tuple[NDArray[np.float32], ...]


def _batches(
    job: TorchJob,
    indices: Indices,
    epoch: int,
    steps: range,
    shape: tuple[int, int],
    dtype: str,
    layers: Sequence[NoiseSpec],
) -> _Batches:
    x, y = job.data.batch(indices, dtype)
    draws = [draw_noise(layers, job.settings.seed, job.round, epoch, step, shape[1]) for step in steps]
    noise = tuple(np.stack([draw[spec.name] for draw in draws]) for spec in layers)
    return _Batches(x.reshape(*shape, *x.shape[1:]), y.reshape(*shape, *y.shape[1:]), noise)


def _stacked(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0][None] if len(arrays) == 1 else np.stack(arrays)
