"""Parameters of several virtual devices as the rows of one tensor, and the optimizer that works on
all at once.

A row holds all parameters of one device one behind the other, so that clipping and the optimizer
are a handful of operators whatever the number of layers: on a narrow model, operators cost more to
start than to run.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet_protocol.manifest import Manifest
from trainer_export.optimizer import Optimizer, Slot, optimizer_named
from trainer_export.optimizers.sgd import Sgd

_IMAGE_KERNEL = 4  # dimensions of the weight of a convolution over images
_VECTOR = 16  # float32 of the widest registers


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in a row."""

    name: str
    shape: tuple[int, ...]
    start: int  # its first entry in the row
    channels_last: bool = (
        False  # whether its second dimension varies fastest, as convolutions on a CPU want it
    )

    @property
    def stop(self) -> int:
        """The entry behind its last one."""
        return self.start + math.prod(self.shape)

    def view(self, rows: Tensor) -> Tensor:
        """The parameter in some rows, float32 ``[..., entries]``: float32 ``[..., *shape]``,
        sharing memory.
        """
        piece = rows[..., self.start : self.stop]
        if not self.channels_last:
            return piece.view((*rows.shape[:-1], *self.shape))
        outer, inner, *sides = self.shape
        return piece.view((*rows.shape[:-1], outer, *sides, inner)).movedim(-1, -3)

    def row(self, tensor: Tensor) -> Tensor:
        """The reverse of :meth:`view`, for a gradient, float32 ``[k, *shape]``.

        A copy where memory lies otherwise.
        """
        ordered = tensor.movedim(-3, -1) if self.channels_last else tensor
        return ordered.reshape(len(tensor), -1)


@dataclass(frozen=True)
class Layout:
    """The order of the parameters in a row."""

    places: tuple[Place, ...]  # in row order: first those that the loss depends on
    trained: (
        int  # entries of those; the optimizer leaves what is behind them alone, as PyTorch's does
    )

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        used: frozenset[str],
        *,
        channels_last: bool,
    ) -> "Layout":
        """Lay parameters out, those that the loss uses first.

        Image convolutions channels-last if that is wanted.

        Not wanted of a model with a convolution of a single point over fewer channels than a vector
        has: with a stride, its gradient in torch 2.13 (oneDNN, AVX2) writes beyond its memory, and
        the process dies.
        """
        kernels = [shape for shape in shapes.values() if len(shape) == _IMAGE_KERNEL]
        channels_last &= all(shape[2:] != (1, 1) or shape[1] >= _VECTOR for shape in kernels)
        places: list[Place] = []
        start = trained = 0
        for name in sorted(shapes, key=lambda name: name not in used):
            place = Place(
                name,
                shapes[name],
                start,
                channels_last and len(shapes[name]) == _IMAGE_KERNEL,
            )
            places.append(place)
            start = place.stop
            trained = start if name in used else trained
        return cls(tuple(places), trained)

    @property
    def entries(self) -> int:
        """Length of a row."""
        return self.places[-1].stop if self.places else 0

    @property
    def moving(self) -> tuple[Place, ...]:
        """The parameters that the loss depends on."""
        return tuple(place for place in self.places if place.stop <= self.trained)

    def filled(self, weights: Sequence[Mapping[str, NDArray[np.float32]]]) -> Tensor:
        """Rows with the weights of some devices by parameter name, float32 ``[devices, entries]``
        on the CPU.
        """
        rows = torch.empty((len(weights), self.entries))
        for row, tensors in zip(rows, weights, strict=True):
            for place in self.places:
                np.copyto(place.view(row).numpy(), tensors[place.name], casting="no")
        return rows

    def tensors(self, row: Tensor, order: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """The parameters of one device's row on the CPU, by name in some order: new C-contiguous
        float32 arrays.
        """
        found = {place.name: place.view(row).numpy().copy(order="C") for place in self.places}
        return {name: found[name] for name in order}


@dataclass(frozen=True)
class Pull:
    """The weights that some devices were sent, ``[devices, entries]``, and the pull to them,
    ``[devices, 1]``.
    """

    anchors: Tensor
    mu: Tensor


@dataclass(frozen=True)
class Rows:
    """What the optimizer works on, with a row for each device."""

    values: Tensor  # parameters, float32 `[devices, entries]`
    states: Mapping[str, Tensor]  # of the optimizer by name, of the same shape each
    gradient: Tensor  # of the same shape; overwritten by a step
    rate: Tensor  # learning rate of each device, float32 `[devices, 1]`
    steps: Tensor  # of each device so far, float32 `[devices, 1]`
    pull: Pull | None  # added to the gradient before it is clipped; None for no proximal term

    def __getitem__(self, devices: slice) -> "Rows":
        pull = (
            None if self.pull is None else Pull(self.pull.anchors[devices], self.pull.mu[devices])
        )
        states = {name: value[devices] for name, value in self.states.items()}
        return Rows(
            self.values[devices],
            states,
            self.gradient[devices],
            self.rate[devices],
            self.steps[devices],
            pull,
        )


@dataclass(frozen=True)
class Rule:
    """What an optimizer step of a recipe does to rows."""

    optimizer: Optimizer
    clip_norm: float | None
    clip_value: float | None = None

    @classmethod
    def of(cls, manifest: Manifest) -> "Rule":
        """That of a manifest; a ConfigError where its optimizer is not known here."""
        recipe = manifest.recipe
        return cls(
            optimizer_named(recipe.optimizer.name, recipe.optimizer.settings),
            recipe.clip_norm,
            recipe.clip_value,
        )

    def started(self, values: Tensor) -> dict[str, Tensor]:
        """The optimizer's states before the first step, each like the values, float32 ``[devices,
        entries]``.
        """
        return {
            state.name: torch.full_like(values, state.initial) for state in self.optimizer.states
        }

    def step(self, rows: Rows) -> None:
        """Clipping and one step of the optimizer for every device, in place."""
        gradient = rows.gradient
        rate = rows.rate
        if rows.pull is not None:
            gradient.addcmul_(rows.values - rows.pull.anchors, rows.pull.mu)
        if self.clip_value is not None:
            gradient.clamp_(-self.clip_value, self.clip_value)
        scale = torch.ones_like(rate)
        if self.clip_norm is not None:
            norm = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
            scale = torch.clamp(self.clip_norm / (norm + 1e-6), max=1.0)
        if isinstance(self.optimizer, Sgd) and not self.optimizer.nesterov:
            _sgd(rows, self.optimizer, scale)
            return
        rows.steps.add_(1)
        direction, states = self.optimizer.direction(
            Slot(rows.values, gradient.mul_(scale), rows.states, rows.steps)
        )
        for name, value in states.items():
            rows.states[name].copy_(value)
        rows.values.addcmul_(direction, rate, value=-1.0)


def _sgd(rows: Rows, sgd: Sgd, scale: Tensor) -> None:
    """What `Sgd.direction` says, with fewer passes over the memory."""
    if sgd.momentum:
        update = rows.states[sgd.states[0].name].mul_(sgd.momentum).addcmul_(rows.gradient, scale)
    else:
        update = rows.gradient.mul_(scale)
    if sgd.weight_decay:
        update.add_(rows.values, alpha=sgd.weight_decay)
    rows.values.addcmul_(update, rows.rate, value=-1.0)
