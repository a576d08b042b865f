"""Holds parameters of several virtual devices as rows of one tensor, and steps all of them at once.

A row contains all parameters of one device, so that clipping and the optimizer need only a few
operators for any number of layers: on a narrow model, starting an operator costs more than running
it.
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
    """The position of a parameter in a row.

    Attributes:
        name: name of the parameter.
        shape: its shape.
        start: its first entry in the row.
        channels_last: whether its second dimension varies fastest, as convolutions on a CPU prefer.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    channels_last: bool = False

    @property
    def stop(self) -> int:
        """The entry behind its last one."""
        return self.start + math.prod(self.shape)

    def view(self, rows: Tensor) -> Tensor:
        """Return the parameter in some rows, sharing their memory.

        Args:
            rows: float32 ``[..., entries]``.

        Returns:
            Float32 ``[..., *shape]``.
        """
        entries = rows[..., self.start : self.stop]
        batch_shape = rows.shape[:-1]
        if not self.channels_last:
            return entries.view((*batch_shape, *self.shape))
        # In memory the channels come last; the view has them second, as the module expects.
        outer, inner, *sides = self.shape
        in_memory = entries.view((*batch_shape, outer, *sides, inner))
        return in_memory.movedim(-1, -3)

    def row(self, tensor: Tensor) -> Tensor:
        """Return a gradient, float32 ``[k, *shape]``, as entries of rows: the reverse of `view`.

        It is a copy if the gradient has another memory layout.
        """
        ordered = tensor.movedim(-3, -1) if self.channels_last else tensor
        return ordered.reshape(len(tensor), -1)


@dataclass(frozen=True)
class Layout:
    """The order of the parameters in a row.

    Attributes:
        places: in row order, first those that are trained.
        trained: number of their entries. The optimizer does not change later entries, like
            PyTorch's optimizer for parameters without a gradient.
    """

    places: tuple[Place, ...]
    trained: int

    @classmethod
    def arrange(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        used: frozenset[str],
        *,
        channels_last: bool,
    ) -> "Layout":
        """Lay parameters out.

        A model with a convolution of a single point over fewer channels than a vector has is never
        channels-last: with a stride, its gradient in torch 2.13 (oneDNN, AVX2) writes beyond its
        memory, and the process dies.

        Args:
            shapes: shapes of the parameters by name.
            used: those that are trained, which come first.
            channels_last: whether image convolutions are wanted channels-last.
        """
        if any(_is_narrow_point(shape) for shape in shapes.values()):
            channels_last = False
        places: list[Place] = []
        start = 0
        trained = 0
        # The sort is stable: parameters of both sorts keep the order of the manifest.
        for name in sorted(shapes, key=lambda name: name not in used):
            shape = shapes[name]
            is_image_kernel = len(shape) == _IMAGE_KERNEL
            place = Place(
                name=name,
                shape=shape,
                start=start,
                channels_last=channels_last and is_image_kernel,
            )
            places.append(place)
            start = place.stop
            if name in used:
                trained = start
        return cls(tuple(places), trained)

    @property
    def entries(self) -> int:
        """Length of a row."""
        return self.places[-1].stop if self.places else 0

    @property
    def trained_places(self) -> tuple[Place, ...]:
        """The parameters that are trained."""
        return tuple(place for place in self.places if place.stop <= self.trained)

    def fill_rows(self, weights: Sequence[Mapping[str, NDArray[np.float32]]]) -> Tensor:
        """Return rows with the weights of some devices by parameter name.

        Returns:
            Float32 ``[devices, entries]`` on the CPU.
        """
        rows = torch.empty((len(weights), self.entries))
        for row, tensors in zip(rows, weights, strict=True):
            for place in self.places:
                view = place.view(row).numpy()
                # Weights that are not float32 are an error; they are not converted.
                np.copyto(view, tensors[place.name], casting="no")
        return rows

    def tensors(self, row: Tensor, order: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """Return the parameters of one device's row on the CPU, by name in some order.

        They are new C-contiguous float32 arrays.
        """
        places = {place.name: place for place in self.places}
        tensors = {}
        for name in order:
            view = places[name].view(row)
            # A copy in C order: a view would keep the row's memory, and may be channels-last.
            tensors[name] = view.numpy().copy(order="C")
        return tensors


def _is_narrow_point(shape: Sequence[int]) -> bool:
    """Return whether a weight is that of a convolution of one point over few channels."""
    if len(shape) != _IMAGE_KERNEL:
        return False
    _, channels, *sides = shape
    return sides == [1, 1] and channels < _VECTOR


@dataclass(frozen=True)
class ProximalPull:
    """The proximal term of FedProx.

    Attributes:
        anchors: the weights that the server sent, float32 ``[devices, entries]``.
        mu: strength of the pull, float32 ``[devices, 1]``.
    """

    anchors: Tensor
    mu: Tensor

    def __getitem__(self, devices: slice) -> "ProximalPull":
        return ProximalPull(self.anchors[devices], self.mu[devices])


@dataclass(frozen=True)
class Rows:
    """The data of the optimizer, with a row for each device.

    Attributes:
        values: parameters, float32 ``[devices, entries]``.
        states: states of the optimizer by name, each of the shape of the values.
        gradient: gradient of the shape of the values; a step overwrites it.
        rate: learning rates, float32 ``[devices, 1]``.
        steps: number of steps of each device so far, float32 ``[devices, 1]``.
        pull: added to the gradient before it is clipped; None for no proximal term.
    """

    values: Tensor
    states: Mapping[str, Tensor]
    gradient: Tensor
    rate: Tensor
    steps: Tensor
    pull: ProximalPull | None

    def __getitem__(self, devices: slice) -> "Rows":
        """Return the rows of some devices, sharing memory."""
        states = {}
        for name, state in self.states.items():
            states[name] = state[devices]
        pull = None if self.pull is None else self.pull[devices]
        return Rows(
            values=self.values[devices],
            states=states,
            gradient=self.gradient[devices],
            rate=self.rate[devices],
            steps=self.steps[devices],
            pull=pull,
        )


@dataclass(frozen=True)
class UpdateRule:
    """The optimizer step of a recipe on rows.

    Attributes:
        optimizer: optimizer of the recipe.
        clip_norm: largest norm of a device's gradient; None to leave it.
        clip_value: largest size of an entry of the gradient; None to leave it.
    """

    optimizer: Optimizer
    clip_norm: float | None
    clip_value: float | None = None

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> "UpdateRule":
        """Return the rule of a manifest; a ConfigError where its optimizer is not known here."""
        recipe = manifest.recipe
        optimizer = optimizer_named(recipe.optimizer.name, recipe.optimizer.settings)
        return cls(optimizer, recipe.clip_norm, recipe.clip_value)

    def initial_states(self, values: Tensor) -> dict[str, Tensor]:
        """Return the optimizer's states before the first step.

        Each has the shape of the values, float32 ``[devices, entries]``.
        """
        states = {}
        for state in self.optimizer.states:
            states[state.name] = torch.full_like(values, state.initial)
        return states

    def step(self, rows: Rows) -> None:
        """Clip the gradient of every device and do one step of the optimizer, in place."""
        scale = self._clip(rows)
        if isinstance(self.optimizer, Sgd) and not self.optimizer.nesterov:
            _step_by_sgd(rows, self.optimizer, scale)
            return
        rows.steps.add_(1)
        clipped = rows.gradient.mul_(scale)
        slot = Slot(rows.values, clipped, rows.states, rows.steps)
        direction, states = self.optimizer.direction(slot)
        for name, state in states.items():
            rows.states[name].copy_(state)
        rows.values.addcmul_(direction, rows.rate, value=-1.0)

    def _clip(self, rows: Rows) -> Tensor:
        """Add the proximal pull to the gradients and clip their entries, in place.

        Returns:
            The factors of clipping by norm, float32 ``[devices, 1]``. They are not applied here,
            because plain SGD multiplies and adds in one pass.
        """
        gradient = rows.gradient
        # The order is that of the exported step: the pull is part of the gradient that is clipped.
        pull = rows.pull
        if pull is not None:
            gradient.addcmul_(rows.values - pull.anchors, pull.mu)
        if self.clip_value is not None:
            gradient.clamp_(-self.clip_value, self.clip_value)
        if self.clip_norm is None:
            return torch.ones_like(rows.rate)
        norm = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
        return torch.clamp(self.clip_norm / (norm + 1e-6), max=1.0)


def _step_by_sgd(rows: Rows, sgd: Sgd, scale: Tensor) -> None:
    """Do what `Sgd.direction` says, with fewer passes over the memory."""
    if sgd.momentum:
        momentum = rows.states[sgd.states[0].name]
        direction = momentum.mul_(sgd.momentum).addcmul_(rows.gradient, scale)
    else:
        direction = rows.gradient.mul_(scale)
    if sgd.weight_decay:
        direction.add_(rows.values, alpha=sgd.weight_decay)
    rows.values.addcmul_(direction, rows.rate, value=-1.0)
