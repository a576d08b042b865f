"""Trains virtual devices of one tier with PyTorch, on a CPU or a GPU.

The results equal those of a board's ONNX step. Orders, batches, random numbers, label masks and the
bookkeeping of losses are those of `device_runtime.training`, the recipe is that of the manifest
(specification 1.3). Devices are trained one after the other by the module itself, or several
together by the same module mapped over their parameters (`simulation.torch_backend.steppers`),
whatever their numbers of samples.

This module imports torch; a simulation without this backend does not import it.

Example::

    trainer = TorchTrainer(Registry.zoo().get("conv"), settings, manifest)
    schedule = TrainingSchedule(data, chosen, offer.train, offer.round)
    for result in trainer.train([TorchJob(weights, schedule)]):
        if isinstance(result, ShoalError):
            ...  # this device's update is missing, the others' are not
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from device_runtime.training.epochs import TrainResult, check_parameters
from device_runtime.training.knobs import knob_numbers
from device_runtime.training.labels import training_mask
from device_runtime.training.measuring import Statistics, check_measurable, mean_statistics
from device_runtime.training.schedule import batches
from fleet_protocol.errors import ConfigError, RefusalReason, RefusedError, ShoalError
from fleet_protocol.manifest import Manifest
from models.architecture import Architecture
from models.zoo.layers import set_mode
from simulation.torch_backend.batches import TorchJob, batch_sequences
from simulation.torch_backend.group import GroupTraining, ReadyJob
from simulation.torch_backend.losses import losses_of
from simulation.torch_backend.measuring import StatisticSums
from simulation.torch_backend.model import make_model, used_parameters
from simulation.torch_backend.rows import Layout
from simulation.torch_backend.steppers import GroupStepper, SingleStepper, Stepper
from simulation.torch_backend.tally import LossTally

# Up to here ten devices together took 0.4 to 0.96 of the CPU time they took one by one
# (convolutions, perceptrons and encoders, batch 10); at 1.5 times as much the grouped convolutions
# of `conv` already took 1.1.
_SMALL_STEP_FLOPS = 1e8


@dataclass(frozen=True)
class TorchResult:
    """The training result of a virtual device.

    Attributes:
        tensors: new float32 arrays by parameter name, in the order of the manifest.
        result: steps, loss and time; devices that train together have equal shares of the time.
    """

    tensors: dict[str, NDArray[np.float32]]
    result: TrainResult


Outcome = TorchResult | ShoalError
"""A device's result, or its error."""


class _GroupKey(NamedTuple):
    """The properties in which devices must agree to train together."""

    batch_size: int
    epochs: int
    steps: int | None
    knobs: tuple[tuple[str, float], ...]


class TorchTrainer:
    """Trains any number of virtual devices of one tier.

    Args:
        architecture: the architecture of the artifact set.
        settings: the settings of its export.
        manifest: manifest of the set.
        device: ``cpu`` or ``cuda``.
        threads: threads of one operator on the CPU; 0 keeps torch's number.
        together: whether the jobs of a call are trained together where they agree in batch size and
            length. By default they are on a GPU, where a narrow model leaves most of the chip idle,
            and on a CPU where a step is so small that starting its operators takes longer than
            running them. The group of a device changes the last bits of its result, because
            convolutions then sum in another order; a job that is the only one of its call has the
            same bits every time.
        own: losses of the user's file by name.
        base: the frozen tensors of the set by name.

    Raises:
        ConfigError: the module does not have the parameters of the manifest, or there is no such
            device.
    """

    def __init__(  # noqa: PLR0913  (options by keyword)
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
        self._together = together
        self._own = own
        self._losses = losses_of(manifest, own)
        with self._torch_settings():
            module = make_model(architecture, settings, manifest, base)
            self._parameter_names = [spec.name for spec in manifest.parameters]
            used = frozenset(spec.name for spec in manifest.trained)
            # The proximal term makes the loss depend on every trained parameter.
            if not manifest.recipe.proximal:
                used &= used_parameters(module, manifest)
            self._module = module.to(self._device)
        shapes = {spec.name: spec.shape for spec in manifest.parameters}
        self._group_layout = Layout.arrange(shapes, used, channels_last=False)
        self._single_layout = Layout.arrange(shapes, used, channels_last=device == "cpu")

    def train(self, jobs: Sequence[TorchJob]) -> list[Outcome]:
        """Train virtual devices for the epochs or steps of their offers.

        Args:
            jobs: any number; they are trained at the same time as far as they agree in batch size
                and length.

        Returns:
            For each job in order its result or its error: a `DataError` where the data does not fit
                the model, a `RefusedError` where a loss or a parameter is not finite or the recipe
                lacks what the settings ask for.
        """
        outcomes: dict[int, Outcome] = {}
        groups: dict[_GroupKey, list[ReadyJob]] = {}
        for place, job in enumerate(jobs):
            try:
                ready = self._prepare(place, job)
            except ShoalError as error:
                outcomes[place] = error
                continue
            settings = job.schedule.settings
            knobs = tuple(sorted((settings.knobs or {}).items()))
            key = _GroupKey(settings.batch_size, settings.epochs, settings.steps, knobs)
            groups.setdefault(key, []).append(ready)
        with self._torch_settings():
            for group in groups.values():
                outcomes |= self._train_group(group)
        return [outcomes[place] for place in range(len(jobs))]

    def measure(self, job: TorchJob) -> tuple[Statistics, int]:
        """Measure batch norm statistics of a model on a device's samples.

        They are those of `device_runtime.training.measuring.measure`.

        Returns:
            ``stat.<norm>.mean`` and ``stat.<norm>.var`` as means over the batches, and the number
            of batches.

        Raises:
            DataError: the data does not fit the model, or has one sample only.
            RefusedError: a statistic is not finite.
        """
        job = self._with_fitted_data(job)
        check_measurable(job.schedule)
        with self._torch_settings(), torch.no_grad():
            rows = self._single_layout.fill_rows([job.weights]).to(self._device)
            # The weights become the module's parameters.
            SingleStepper(self._module, self._single_layout, rows, self._manifest, self._losses)
            set_mode(self._module, "statistics")
            try:
                sums = self._sum_statistics(job)
            finally:
                set_mode(self._module, "train")
        return mean_statistics(sums.arrays(), sums.count, job.schedule.round), sums.count

    def _sum_statistics(self, job: TorchJob) -> StatisticSums:
        """Sum the statistics of the module over a device's batches."""
        schedule = job.schedule
        plan = list(batches(schedule.order(), schedule.settings.batch_size))
        sums = StatisticSums(self._module, self._manifest)
        for piece in batch_sequences([job], [plan], 0, self._manifest, noise=False):
            # The unbiased variance of one sample does not exist.
            if piece.x.shape[2] > 1:
                sums.add(torch.from_numpy(piece.x[0]).to(self._device))
        return sums

    def _with_fitted_data(self, job: TorchJob) -> TorchJob:
        """Return the job with targets as the loss expects them."""
        data = job.schedule.data.fit_to(self._manifest)
        return replace(job, schedule=replace(job.schedule, data=data))

    def _prepare(self, place: int, job: TorchJob) -> ReadyJob:
        """Validate a job, and create its label mask.

        Raises:
            DataError: its data does not fit the model, or all its labels are ignored.
            RefusedError: the recipe does not support its settings.
        """
        job = self._with_fitted_data(job)
        manifest = self._manifest
        schedule = job.schedule
        if schedule.settings.proximal_mu and not manifest.recipe.proximal:
            raise RefusedError(
                RefusalReason.UNSUPPORTED,
                f"artifact set {manifest.arch} {manifest.tier} has no proximal term, which mu = "
                f"{schedule.settings.proximal_mu:g} of FedProx needs; export it again with a "
                "proximal recipe",
            )
        knob_numbers(manifest, schedule.settings.knobs)  # refuses numbers that the loss lacks
        mask = training_mask(
            schedule.data,
            schedule.chosen,
            manifest.classes,
            masked=schedule.settings.mask_labels,
        )
        return ReadyJob(place, job, mask)

    def _train_group(self, group: Sequence[ReadyJob]) -> dict[int, Outcome]:
        """Train devices that agree in batch size and length; outcomes by place."""
        if self._should_train_together(group):
            # `batch_sequences` needs the largest first.
            ordered = sorted(group, key=lambda ready: -len(ready.job.schedule.chosen))
            return self._train_rows(ordered, GroupStepper, self._group_layout)
        outcomes: dict[int, Outcome] = {}
        for ready in group:
            outcomes |= self._train_rows([ready], SingleStepper, self._single_layout)
        return outcomes

    def _should_train_together(self, group: Sequence[ReadyJob]) -> bool:
        """Return whether to train devices that agree in batch size and length together."""
        if self._together is not None:
            return self._together
        if len(group) == 1:
            return False
        batch_size = group[0].job.schedule.settings.batch_size
        step_flops = self._manifest.flops_per_step_sample * batch_size
        return self._device.type == "cuda" or step_flops <= _SMALL_STEP_FLOPS

    def _train_rows(
        self,
        group: Sequence[ReadyJob],
        stepper_type: type[SingleStepper] | type[GroupStepper],
        layout: Layout,
    ) -> dict[int, Outcome]:
        """Train devices as the rows of one tensor, and return their outcomes by place."""
        started = time.monotonic()
        rows = layout.fill_rows([ready.job.weights for ready in group]).to(self._device)
        # Devices of a group agree in the numbers of the loss.
        knobs = group[0].job.schedule.settings.knobs
        losses = losses_of(self._manifest, self._own, knobs) if knobs else self._losses
        stepper: Stepper = stepper_type(self._module, layout, rows, self._manifest, losses)
        trained_values = rows[:, : layout.trained]
        tallies = GroupTraining(self._manifest, stepper, trained_values, group).run()
        seconds = (time.monotonic() - started) / len(group)
        outcomes: dict[int, Outcome] = {}
        for ready, row, tally in zip(group, rows.cpu(), tallies, strict=True):
            tensors = layout.tensors(row, self._parameter_names)
            outcomes[ready.place] = _outcome(ready.job, tensors, tally, seconds)
        return outcomes

    @contextmanager
    def _torch_settings(self) -> Iterator[None]:
        """Give torch this trainer's threads, and on a GPU reproducible sums of full precision."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads or threads)
        try:
            with torch.backends.cudnn.flags(
                enabled=True,
                benchmark=False,
                deterministic=True,
                allow_tf32=False,
            ):
                yield
        finally:
            torch.set_num_threads(threads)


def _outcome(
    job: TorchJob,
    tensors: dict[str, NDArray[np.float32]],
    tally: LossTally,
    seconds: float,
) -> Outcome:
    """Return the result of a device; an error if a number is not finite."""
    if tally.failure is not None:
        return tally.failure
    try:
        check_parameters(tensors, job.schedule.round, tally.steps)
    except RefusedError as error:
        return error
    return TorchResult(tensors, tally.result(seconds))
