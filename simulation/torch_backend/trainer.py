"""Trains virtual devices of one tier with PyTorch, on a CPU or a GPU, to the result a board gets
from its ONNX step.

Orders, batches, random numbers, label masks and the bookkeeping of losses are those of
`device_runtime.training`, the recipe is that of the manifest (specification 1.3). Devices are
trained one after the other by the module itself, or several together by the same module mapped over
their parameters (`simulation.torch_backend.model`), whatever their numbers of samples.

This module imports torch; a simulation without this backend does not import it.

Example::

    trainer = TorchTrainer(Registry.zoo().get("conv"), settings, manifest) for result in
    trainer.train([TorchJob(weights, TrainingSchedule(data, chosen, offer.train, offer.round))]):
        if isinstance(result, ShoalError): ...  # this device's update is missing, the others' are not
"""

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from device_runtime.training.epochs import TrainResult, check_parameters, loss_refused
from device_runtime.training.labels import training_mask
from device_runtime.training.measuring import (
    Statistics,
    check_measurable,
    mean_statistics,
)
from device_runtime.training.schedule import batches
from fleet_protocol.errors import ConfigError, RefusalReason, RefusedError, ShoalError
from fleet_protocol.manifest import Manifest, statistic_mean, statistic_variance
from fleet_protocol.targets import counted
from models.architecture import Architecture
from models.zoo.layers import StaticBatchNorm, set_mode
from simulation.torch_backend.batches import TorchJob, pieces
from simulation.torch_backend.model import (
    Alone,
    Batch,
    Stepper,
    Together,
    losses_of,
    make_model,
    used_parameters,
)
from simulation.torch_backend.rows import Layout, Pull, Rows, Rule

# Up to here ten devices together took 0.4 to 0.96 of the CPU time they took one by one
# (convolutions, perceptrons and encoders, batch 10); at 1.5 times as much the grouped convolutions
# of `conv` already took 1.1.
_SMALL_STEP_FLOPS = 1e8


@dataclass(frozen=True)
class TorchResult:
    """What a virtual device ends its training with."""

    tensors: dict[
        str, NDArray[np.float32]
    ]  # new float32 arrays by parameter name, in manifest order
    # steps, loss and time; of devices trained together, each has an equal share of the time
    result: TrainResult


@dataclass(frozen=True)
class _Ready:
    """A job that may start: its place among the jobs, and its label mask."""

    place: int
    job: TorchJob
    mask: NDArray[np.float32]


class _Tally:
    """The losses of one device, kept as `device_runtime.training.epochs.train` keeps them."""

    def __init__(self, job: TorchJob, manifest: Manifest) -> None:
        self._schedule = job.schedule
        self._manifest = manifest
        self._mean = math.nan
        self._total = 0.0
        self._weight = 0.0
        self.steps = 0
        self.failure: ShoalError | None = None

    def add(self, epoch: int, losses: NDArray[np.float64], counts: NDArray[np.float64]) -> None:
        """Take a pass over the samples into account."""
        bad = np.flatnonzero(~np.isfinite(losses))
        if len(bad) and self.failure is None:
            step = self.steps + int(bad[0]) + 1
            step_seed = self._schedule.step_seed(epoch, int(bad[0]))
            self.failure = loss_refused(float(losses[bad[0]]), self._manifest, step_seed, step)
        self.steps += len(losses)
        total = float(losses @ counts)
        weight = float(counts.sum())
        self._mean = total / weight if weight else self._mean
        self._total = self._total + total
        self._weight = self._weight + weight

    def result(self, seconds: float) -> TrainResult:
        """The figures of the whole training, which took that long."""
        mean = self._total / self._weight if self._weight else None
        return TrainResult(self.steps, self._mean, seconds, mean)


class TorchTrainer:
    """Trains any number of virtual devices of one tier.

    Args:
        architecture: what the artifact set was exported from.
        settings: those it was exported with.
        manifest: of the set.
        device: ``cpu`` or ``cuda``.
        threads: of one operator on the CPU; 0 leaves torch's own number.
        together: whether the jobs of a call are trained together where they agree in batch size and
            length. By default they are on a GPU, where a narrow model leaves most of the chip idle,
            and on a CPU where a step is so small that starting its operators takes longer than
            running them. Which devices a device is trained together with changes the last bits of
            what it ends with, since convolutions then sum in another order; a job that is alone in
            its call has the same bits every time.
        own: losses of the user's file by name.
        base: the frozen tensors of the set by name.

    Raises:
        ConfigError: the module does not have the parameters of the manifest, or there is no such
            device.
    """

    def __init__(
        self,
        architecture: Architecture,
        settings: Mapping[str, Any] | None,
        manifest: Manifest,
        *,
        device: Literal["cpu", "cuda"] = "cpu",
        threads: int = 1,
        together: bool | None = None,
        own: Mapping[str, Any] = MappingProxyType({}),
        base: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                'torch sees no CUDA device here; set device = "cpu", or install a CUDA build of '
                "torch"
            )
        self._manifest = manifest
        self._threads = threads
        self._device = torch.device(device)
        self._wish = together
        self._losses = losses_of(manifest, own)
        with self._settled():
            module = make_model(architecture, settings, manifest, base)
            names = frozenset(spec.name for spec in manifest.parameters)
            # The proximal term makes the loss depend on every parameter.
            used = names if manifest.recipe.proximal else used_parameters(module, manifest)
            self._module = module.to(self._device)
        shapes = {spec.name: spec.shape for spec in manifest.parameters}
        self._together_layout = Layout.of(shapes, used, channels_last=False)
        self._alone_layout = Layout.of(shapes, used, channels_last=device == "cpu")

    def train(self, jobs: Sequence[TorchJob]) -> list[TorchResult | ShoalError]:
        """Train virtual devices for the epochs or steps of their offers.

        Args:
            jobs: any number; they are trained at the same time as far as they agree in batch size
                and length.

        Returns:
            For each job in its order its result, or why it has none while the others do: a
                `DataError` where the data does not fit the model, a `RefusedError` where a loss or
                a parameter is not finite or the recipe lacks what the settings ask for.
        """
        outcomes: dict[int, TorchResult | ShoalError] = {}
        groups: dict[tuple[int, int, int | None], list[_Ready]] = {}
        for place, job in enumerate(jobs):
            try:
                ready = self._ready(place, job)
            except ShoalError as error:
                outcomes[place] = error
                continue
            key = (
                job.schedule.settings.batch_size,
                job.schedule.settings.epochs,
                job.schedule.settings.steps,
            )
            groups.setdefault(key, []).append(ready)
        with self._settled():
            for group in groups.values():
                if self._groups(group):
                    outcomes |= self._run(
                        sorted(group, key=lambda ready: -len(ready.job.schedule.chosen)),
                        together=True,
                    )
                else:
                    for ready in group:
                        outcomes |= self._run([ready], together=False)
        return [outcomes[place] for place in range(len(jobs))]

    def measure(self, job: TorchJob) -> tuple[Statistics, int]:
        """Batch norm statistics of a model on a device's samples, as
        `device_runtime.training.measuring.measure`.

        Returns:
            ``stat.<norm>.mean`` and ``stat.<norm>.var`` as means over the batches, and the number
            of batches.

        Raises:
            DataError: the data does not fit the model, or has one sample only.
            RefusedError: a statistic is not finite.
        """
        job = self._fitted(job)
        schedule = job.schedule
        check_measurable(schedule)
        plan = list(batches(schedule.order(), schedule.settings.batch_size))
        sums: dict[str, Tensor] = {}
        count = 0
        with self._settled(), torch.no_grad():
            rows = self._alone_layout.filled([job.weights]).to(self._device)
            Alone(self._module, self._alone_layout, rows, self._manifest, self._losses)
            set_mode(self._module, "statistics")
            try:
                norms = {
                    spec.name: self._module.get_submodule(spec.name)
                    for spec in self._manifest.statistics
                }
                for piece in pieces([job], [plan], 0, self._manifest, noise=False):
                    if piece.x.shape[2] == 1:  # the unbiased variance of one sample does not exist
                        continue
                    for x in torch.from_numpy(piece.x[0]).to(self._device):
                        self._module(x)
                        count += 1
                        for name, norm in norms.items():
                            assert isinstance(norm, StaticBatchNorm)
                            assert norm.last_mean is not None
                            assert norm.last_var is not None
                            pair = {
                                statistic_mean(name): norm.last_mean,
                                statistic_variance(name): norm.last_var,
                            }
                            for key, value in pair.items():
                                sums[key] = sums[key] + value if key in sums else value.double()
            finally:
                set_mode(self._module, "train")
        arrays = {name: value.cpu().numpy() for name, value in sums.items()}
        return mean_statistics(arrays, count, schedule.round), count

    def _fitted(self, job: TorchJob) -> TorchJob:
        """The job with targets as the loss takes them."""
        return replace(
            job, schedule=replace(job.schedule, data=job.schedule.data.fit_to(self._manifest))
        )

    def _ready(self, place: int, job: TorchJob) -> _Ready:
        """See that a job can be done.

        Raises:
            DataError: its data does not fit the model, or none of its labels counts.
            RefusedError: the recipe lacks what its settings ask for.
        """
        job = self._fitted(job)
        manifest = self._manifest
        schedule = job.schedule
        if schedule.settings.proximal_mu and not manifest.recipe.proximal:
            raise RefusedError(
                RefusalReason.UNSUPPORTED,
                f"artifact set {manifest.arch} {manifest.tier} has no proximal term, which mu = "
                f"{schedule.settings.proximal_mu:g} of FedProx needs; export it again with a "
                f"proximal recipe",
            )
        mask = training_mask(
            schedule.data,
            schedule.chosen,
            manifest.classes,
            masked=schedule.settings.mask_labels,
        )
        return _Ready(place, job, mask)

    def _groups(self, group: Sequence[_Ready]) -> bool:
        """Whether to train devices that agree in batch size and length together."""
        if self._wish is not None:
            return self._wish
        step_flops = (
            self._manifest.flops_per_step_sample * group[0].job.schedule.settings.batch_size
        )
        return len(group) > 1 and (self._device.type == "cuda" or step_flops <= _SMALL_STEP_FLOPS)

    def _run(
        self, group: Sequence[_Ready], *, together: bool
    ) -> dict[int, TorchResult | ShoalError]:
        """Train devices that agree in batch size and length, the largest first.

        Outcomes by place.
        """
        started = time.monotonic()
        layout = self._together_layout if together else self._alone_layout
        rows = layout.filled([ready.job.weights for ready in group]).to(self._device)
        kind = Together if together else Alone
        stepper: Stepper = kind(self._module, layout, rows, self._manifest, self._losses)
        tallies = [_Tally(ready.job, self._manifest) for ready in group]
        self._train_rows(stepper, rows[:, : layout.trained], group, tallies)
        seconds = (time.monotonic() - started) / len(group)
        order = [spec.name for spec in self._manifest.parameters]
        outcomes: dict[int, TorchResult | ShoalError] = {}
        for ready, row, tally in zip(group, rows.cpu(), tallies, strict=True):
            if tally.failure is not None:
                outcomes[ready.place] = tally.failure
                continue
            tensors = layout.tensors(row, order)
            try:
                check_parameters(tensors, ready.job.schedule.round, tally.steps)
                outcomes[ready.place] = TorchResult(tensors, tally.result(seconds))
            except RefusedError as error:
                outcomes[ready.place] = error
        return outcomes

    def _train_rows(
        self,
        stepper: Stepper,
        values: Tensor,
        group: Sequence[_Ready],
        tallies: Sequence[_Tally],
    ) -> None:
        """Train until every device has done its passes, or failed.

        The trained part of their rows changes in place.
        """
        jobs = [ready.job for ready in group]
        rule = Rule.of(self._manifest)
        rate = self._column([job.schedule.settings.learning_rate for job in jobs])
        mu = [job.schedule.settings.proximal_mu for job in jobs]
        pull = Pull(values.clone(), self._column(mu)) if any(mu) else None
        everyone = Rows(
            values,
            rule.started(values),
            torch.empty_like(values),
            rate,
            torch.zeros_like(rate),
            pull,
        )
        masks = np.stack([ready.mask for ready in group])
        mask = None if masks.all() else torch.from_numpy(masks).to(self._device)
        ahead = [job.schedule.passes() for job in jobs]
        for epoch in itertools.count():
            plans = [next((list(planned.batches) for planned in each), []) for each in ahead]
            if not any(plans) or all(tally.failure for tally in tallies):
                return
            losses = torch.zeros((len(jobs), max(map(len, plans))), device=self._device)
            counts = np.zeros(losses.shape)
            for piece in pieces(jobs, plans, epoch, self._manifest):
                who = piece.devices
                x, y = (torch.from_numpy(array).to(self._device) for array in (piece.x, piece.y))
                noise = [torch.from_numpy(array).to(self._device) for array in piece.noise]
                part = None if mask is None else mask[who]
                rows = everyone[who]
                for number in range(x.shape[1]):
                    step = piece.first + number
                    batch = Batch(
                        who,
                        x[:, number],
                        y[:, number],
                        part,
                        [numbers[:, number] for numbers in noise],
                    )
                    losses[who, step] = stepper.gradients(batch, rows.gradient)
                    rule.step(rows)
                    counts[who, step] = [counted(labels) for labels in piece.y[:, number]]
            found = losses.cpu().numpy().astype(np.float64)
            for tally, plan, each, weights in zip(tallies, plans, found, counts, strict=True):
                tally.add(epoch, each[: len(plan)], weights[: len(plan)])

    def _column(self, numbers: Sequence[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float32, device=self._device)[:, None]

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """Torch with this trainer's threads, and on a GPU with the same sums every time and no
        short mantissas.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads or threads)
        try:
            with torch.backends.cudnn.flags(
                enabled=True, benchmark=False, deterministic=True, allow_tf32=False
            ):
                yield
        finally:
            torch.set_num_threads(threads)
