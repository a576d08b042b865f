"""A task's path through a board's samples: held-out samples, order, and random draws.

Nothing here depends on the agent, MQTT or the disk. Every order is a function only of numbers in
the offer and of the number of samples, so that a simulation reproduces a device bit by bit:

- ``holdout_split(n, share)``: a permutation of ``n`` from ``PCG64(SeedSequence([n]))``; its first
  ``round(share * n)`` entries (at least one, at most ``n - 1``) are held out, both parts sorted. It
  is the same in every round, so no sample is ever both trained on and evaluated.
- ``sample_order(seed, round, epoch, n)``: a permutation of ``n`` from ``PCG64(SeedSequence([seed,
  round, epoch]))``, epochs from 0. Batches are consecutive pieces of it; a short last batch is kept
  (specification 1.3: local SGD over all batches).
- ``draw_noise(layers, step_seed, count)``: what the layers of a model draw at random in one step,
  from ``PCG64(SeedSequence([seed, round, epoch, step], spawn_key=(1,)))``: one generator for the
  layers in manifest order, ``random((count, *shape), float32)`` each; steps count from 0 within an
  epoch.
  Evaluation draws nothing.
- ``training_batch(...)``: the samples of a step. With ``augment`` in the board's ``[data]`` they
  are changed at random: its entries draw in turn from ``PCG64(SeedSequence([seed, round, epoch,
  step], spawn_key=(2,)))``; see `fleet_protocol.data.augment`.
- a statistics task uses the order of epoch 0 and drops a last batch of one sample, whose unbiased
  variance is undefined (specification 1.6). Its samples are those of the steps of a training with
  the same seed, including augmentation.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.data.dataset import DataSet
from fleet_protocol.manifest import NoiseSpec
from fleet_protocol.messages import TrainSettings
from fleet_protocol.targets import Targets

Indices = NDArray[np.int64]

# Keeps the draws of a step apart from `sample_order`: without a key, [a, b, c] and [a, b, c, 0]
# seed alike.
_NOISE = 1
_AUGMENT = 2


@dataclass(frozen=True)
class StepSeed:
    """The numbers of a training step from which all its random draws follow.

    Attributes:
        seed: seed of the task.
        round: from 1.
        epoch: from 0.
        step: within the epoch, from 0.
    """

    seed: int
    round: int
    epoch: int
    step: int

    def generator(self, key: int) -> np.random.Generator:
        """Return a generator for one purpose, which the key identifies."""
        sequence = np.random.SeedSequence(
            [self.seed, self.round, self.epoch, self.step], spawn_key=(key,)
        )
        return np.random.Generator(np.random.PCG64(sequence))


@dataclass(frozen=True)
class Pass:
    """One pass over the training samples.

    Attributes:
        epoch: its number, from 0.
        epochs: number of all epochs.
        batches: indices of the samples of each step.
    """

    epoch: int
    epochs: int
    batches: tuple[Indices, ...]


@functools.lru_cache(64)  # a simulation calls it for its devices again and again
def holdout_split(n: int, share: float) -> tuple[Indices, Indices]:
    """Return which samples are trained on and which are held out (see the module's docstring).

    Returns:
        Training and held-out indices, each sorted; with one sample, or share 0, nothing is held
        out.
    """
    held = min(max(1, round(share * n)), n - 1) if share > 0 else 0
    order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([n]))).permutation(n)
    return np.sort(order[held:]), np.sort(order[:held])


def sample_order(
    seed: int,
    round_number: int,
    epoch: int,
    n: int,
) -> Indices:
    """Return the order of ``n`` training samples in one epoch (see the module's docstring)."""
    sequence = np.random.SeedSequence([seed, round_number, epoch])
    return np.random.Generator(np.random.PCG64(sequence)).permutation(n)


def batches(order: Indices, batch_size: int) -> Iterator[Indices]:
    """Yield consecutive pieces of an order; the last may be shorter."""
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def draw_noise(
    layers: Sequence[NoiseSpec], step_seed: StepSeed, count: int
) -> dict[str, NDArray[np.float32]]:
    """Return what the layers draw in one training step (see the module's docstring).

    Returns:
        Layer to float32 ``[count, *shape]`` in [0, 1).
    """
    noise: dict[str, NDArray[np.float32]] = {}
    if not layers:
        return noise
    generator = step_seed.generator(_NOISE)
    for layer in layers:  # in this order, which determines what each draws
        noise[layer.name] = generator.random((count, *layer.shape), np.float32)
    return noise


def training_batch(
    data: DataSet, indices: Indices, dtype: str, step_seed: StepSeed
) -> tuple[NDArray[Any], Targets]:
    """Return samples and targets of one training step (see the module's docstring).

    Returns:
        New arrays ``[B, ...]``.
    """
    x, y = data.batch(indices, dtype)
    if data.augment:
        x = data.augmented(x, step_seed.generator(_AUGMENT))
    return x, y


@dataclass(frozen=True)
class TrainingSchedule:
    """The samples on which a task trains or measures, and their order.

    Attributes:
        data: all samples of the board.
        chosen: indices of the training samples.
        settings: settings of the offer.
        round: number of the round, from 1.
    """

    data: DataSet
    chosen: Indices
    settings: TrainSettings
    round: int

    def passes(self) -> Iterator[Pass]:
        """Yield the batches of a training, pass by pass: the last ends with the last step."""
        per_pass = math.ceil(len(self.chosen) / self.settings.batch_size)
        count = math.ceil(self.steps / per_pass)
        for epoch in range(count):
            planned = tuple(batches(self.order(epoch), self.settings.batch_size))
            yield Pass(epoch, count, planned[: self.steps - epoch * per_pass])

    @property
    def steps(self) -> int:
        """Number of steps of the whole training."""
        return self.settings.steps_for(len(self.chosen))

    def order(self, epoch: int = 0) -> Indices:
        """Return the indices of a pass, in its order."""
        order = sample_order(self.settings.seed, self.round, epoch, len(self.chosen))
        return self.chosen[order]

    def step_seed(self, epoch: int, step: int) -> StepSeed:
        """Return the seed of a step of this task."""
        return StepSeed(self.settings.seed, self.round, epoch, step)

    @property
    def measurable(self) -> bool:
        """Whether the samples have batch norm statistics: a variance needs two in a batch."""
        return len(self.chosen) >= 2 and self.settings.batch_size >= 2
