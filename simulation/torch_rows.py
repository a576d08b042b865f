"""Parameters of several virtual devices as the rows of one tensor, and the optimizer that works on all at once.

A row holds all parameters of one device one behind the other, so that clipping and the optimizer are a handful of
operators whatever the number of layers: on a narrow model, operators cost more to start than to run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleet_protocol.manifest import RecipeSpec

__all__ = ["Layout", "Place", "Pull", "sgd_rows"]

_IMAGE_KERNEL = 4  # dimensions of the weight of a convolution over images


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in a row.

    Attributes:
        name: of the parameter.
        shape: its sizes.
        start: its first entry in the row.
        channels_last: whether its second dimension varies fastest, as convolutions on a CPU want it.
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
        """The parameter in some rows.

        Args:
            rows: float32 ``[..., entries]``.

        Returns:
            float32 ``[..., *shape]``, sharing memory.
        """
        piece = rows[..., self.start : self.stop]
        if not self.channels_last:
            return piece.view((*rows.shape[:-1], *self.shape))
        outer, inner, *sides = self.shape
        return piece.view((*rows.shape[:-1], outer, *sides, inner)).movedim(-1, -3)

    def row(self, tensor: Tensor) -> Tensor:
        """The reverse of :meth:`view`, for a gradient.

        Args:
            tensor: float32 ``[k, *shape]``.

        Returns:
            float32 ``[k, entries]``; a copy only where the memory lies otherwise.
        """
        ordered = tensor.movedim(-3, -1) if self.channels_last else tensor
        return ordered.reshape(len(tensor), -1)


@dataclass(frozen=True)
class Layout:
    """The order of the parameters in a row.

    Attributes:
        places: in row order: first those that the loss depends on.
        trained: entries of those; the optimizer leaves what is behind them alone, as PyTorch's does.
    """

    places: tuple[Place, ...]
    trained: int

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], used: frozenset[str], *, channels_last: bool) -> Layout:
        """Lay parameters out.

        Args:
            shapes: of the parameters by name.
            used: names of those the loss depends on.
            channels_last: whether to store the weights of image convolutions that way.
        """
        places: list[Place] = []
        start = trained = 0
        for name in sorted(shapes, key=lambda name: name not in used):
            place = Place(name, shapes[name], start, channels_last and len(shapes[name]) == _IMAGE_KERNEL)
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
        """Rows with the weights of some devices.

        Args:
            weights: float32 arrays by parameter name, one mapping per device.

        Returns:
            float32 ``[devices, entries]`` on the CPU.
        """
        rows = torch.empty((len(weights), self.entries))
        for row, tensors in zip(rows, weights, strict=True):
            for place in self.places:
                np.copyto(place.view(row).numpy(), tensors[place.name], casting="no")
        return rows

    def tensors(self, row: Tensor, order: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """The parameters of one device.

        Args:
            row: float32 ``[entries]`` on the CPU.
            order: their names in the order wanted.

        Returns:
            New C-contiguous float32 arrays by name.
        """
        found = {place.name: place.view(row).numpy().copy(order="C") for place in self.places}
        return {name: found[name] for name in order}


@dataclass(frozen=True)
class Pull:
    """The proximal term of some devices.

    Attributes:
        anchors: the weights each was sent, float32 ``[devices, entries]``.
        mu: strength for each, float32 ``[devices, 1]``.
    """

    anchors: Tensor
    mu: Tensor


def sgd_rows(
    values: Tensor, momentum: Tensor, gradient: Tensor, rate: Tensor, recipe: RecipeSpec, pull: Pull | None
) -> None:
    """One step of `trainer_export.recipe.sgd_step` for every device, in place.

    Args:
        values: parameters, float32 ``[devices, entries]``.
        momentum: buffers of the same shape; left alone where the recipe has no momentum.
        gradient: of the same shape; overwritten.
        rate: learning rate of each device, float32 ``[devices, 1]``.
        recipe: the numbers.
        pull: added to the gradient before it is clipped; None for no proximal term.
    """
    if pull is not None:
        gradient.addcmul_(values - pull.anchors, pull.mu)
    if recipe.clip_norm is not None:
        norm = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
        scale = torch.clamp(recipe.clip_norm / (norm + 1e-6), max=1.0)
    else:
        scale = torch.ones_like(rate)
    update = momentum.mul_(recipe.momentum).addcmul_(gradient, scale) if recipe.momentum else gradient.mul_(scale)
    if recipe.weight_decay:
        update.add_(values, alpha=recipe.weight_decay)
    values.addcmul_(update, rate, value=-1.0)
