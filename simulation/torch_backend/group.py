"""Trains devices with equal batch size and length, step by step, as rows of one tensor."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from device_runtime.training.schedule import Indices, Pass
from fleet_protocol.manifest import Manifest
from fleet_protocol.targets import counted
from simulation.torch_backend.batches import BatchSequence, TorchJob, batch_sequences
from simulation.torch_backend.rows import ProximalPull, Rows, UpdateRule
from simulation.torch_backend.steppers import Batch, Stepper
from simulation.torch_backend.tally import LossTally

Plan = list[Indices]
"""The indices of every batch of a pass."""


@dataclass(frozen=True)
class ReadyJob:
    """A job that may start.

    Attributes:
        place: its place among the jobs.
        job: the job, with targets as the loss expects them.
        mask: 1 for labels the device has, else 0, float32 ``[classes]``.
    """

    place: int
    job: TorchJob
    mask: NDArray[np.float32]


@dataclass(frozen=True)
class _PassLosses:
    """The results of a pass over the samples, with a row for each device.

    Attributes:
        losses: mean loss of each batch, float32 ``[devices, steps]``, on the trainer's device.
        counts: number of targets that are not ignored in each batch, float64 ``[devices, steps]``.
    """

    losses: Tensor
    counts: NDArray[np.float64]


class GroupTraining:
    """The training of some devices at the same time.

    Args:
        manifest: manifest of the artifact set.
        stepper: computes losses and gradients.
        values: the trained part of the devices' rows, float32 ``[devices, trained entries]``,
            which changes in place.
        group: the devices, the largest first.
    """

    def __init__(
        self,
        manifest: Manifest,
        stepper: Stepper,
        values: Tensor,
        group: Sequence[ReadyJob],
    ) -> None:
        self._manifest = manifest
        self._stepper = stepper
        self._device = values.device
        self._jobs = [ready.job for ready in group]
        self._rule = UpdateRule.from_manifest(manifest)
        self._rows = self._make_rows(values)
        self._mask = self._make_mask(group)

    def run(self) -> list[LossTally]:
        """Train until every device has done its passes, or failed.

        Returns:
            The losses of each device.
        """
        tallies = []
        passes = []
        for job in self._jobs:
            tallies.append(LossTally(job.schedule, self._manifest))
            passes.append(job.schedule.passes())
        for epoch in itertools.count():
            plans = [_next_plan(device_passes) for device_passes in passes]
            # A failed device continues while others train; its result is discarded.
            has_ended = not any(plans) or all(tally.failure for tally in tallies)
            if has_ended:
                break
            self._run_pass(epoch, plans, tallies)
        return tallies

    def _make_rows(self, values: Tensor) -> Rows:
        """Return what the optimizer works on before the first step."""
        rates = []
        mus = []
        for job in self._jobs:
            settings = job.schedule.settings
            rates.append(settings.learning_rate)
            mus.append(settings.proximal_mu)
        rate = self._column(rates)
        pull = None
        # Without it, a copy of all the weights is saved.
        if any(mus):
            pull = ProximalPull(values.clone(), self._column(mus))
        return Rows(
            values=values,
            states=self._rule.initial_states(values),
            gradient=torch.empty_like(values),
            rate=rate,
            steps=torch.zeros_like(rate),
            pull=pull,
        )

    def _make_mask(self, group: Sequence[ReadyJob]) -> Tensor | None:
        """Return the label masks, float32 ``[devices, classes]``; None where all are ones."""
        masks = np.stack([ready.mask for ready in group])
        return None if masks.all() else self._send(masks)

    def _run_pass(
        self,
        epoch: int,
        plans: Sequence[Plan],
        tallies: Sequence[LossTally],
    ) -> None:
        """Train every device for a pass over its samples."""
        most_steps = max(map(len, plans))
        losses = torch.zeros((len(plans), most_steps), device=self._device)
        pass_losses = _PassLosses(losses, np.zeros(losses.shape))
        for piece in batch_sequences(self._jobs, plans, epoch, self._manifest):
            self._run_piece(piece, pass_losses)
        # Only here does the host wait for a GPU: once for each pass.
        by_device = losses.cpu().numpy().astype(np.float64)
        for device, plan in enumerate(plans):
            # After its last batch, a device has zeros while others have more batches.
            steps = len(plan)
            device_losses = by_device[device, :steps]
            device_counts = pass_losses.counts[device, :steps]
            tallies[device].add(epoch, device_losses, device_counts)

    def _run_piece(self, piece: BatchSequence, pass_losses: _PassLosses) -> None:
        """Train some devices for consecutive batches, and note their losses."""
        devices = piece.devices
        x = self._send(piece.x)
        y = self._send(piece.y)
        noise = [self._send(numbers) for numbers in piece.noise]
        mask = None if self._mask is None else self._mask[devices]
        # Views, through which the optimizer changes the rows of all devices.
        rows = self._rows[devices]
        counts = pass_losses.counts[devices]
        for number in range(x.shape[1]):
            step = piece.first + number
            step_noise = [numbers[:, number] for numbers in noise]
            batch = Batch(
                devices=devices,
                x=x[:, number],
                y=y[:, number],
                mask=mask,
                noise=step_noise,
            )
            losses = self._stepper.gradients(batch, rows.gradient)
            # It stays on the device: reading it here would wait for the GPU at every step.
            pass_losses.losses[devices, step] = losses
            self._rule.step(rows)
            step_labels = piece.y[:, number]
            for row, labels in enumerate(step_labels):
                counts[row, step] = counted(labels)

    def _column(self, numbers: Sequence[float]) -> Tensor:
        """Return a number of each device, float32 ``[devices, 1]``."""
        return torch.tensor(numbers, dtype=torch.float32, device=self._device)[:, None]

    def _send(self, array: NDArray[Any]) -> Tensor:
        """Return an array as a tensor on the device that trains."""
        return torch.from_numpy(array).to(self._device)


def _next_plan(passes: Iterator[Pass]) -> Plan:
    """Return the batches of a device's next pass; none when it has done all of them."""
    following = next(passes, None)
    return [] if following is None else list(following.batches)
