"""Permute the units of axes in every tensor that carries them.

Permuting units in all parameters must not change a model's outputs, and must permute the gradients
of a training step in the same way.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.axes import Axis
from models.dims import Dim
from models.zoo.randomized_model import State

Dims = Mapping[str, Sequence[Dim | None]]
"""The dimensions of each parameter; None where a dimension is not known yet."""

Units = NDArray[np.int64]
"""For each place of an axis, the unit that moves there."""

_SEED = 7


def derangement_of(axis: Axis, seed: int) -> Units:
    """Draw a permutation of the units of an axis that leaves no unit in its place.

    It is the same within each group, and no unit leaves its group.
    """
    order = np.random.default_rng([_SEED, seed]).permutation(axis.group_size)
    # A single cycle through all places in a random order moves every unit.
    places = np.empty_like(order)
    places[order] = np.roll(order, -1)
    return (np.arange(axis.groups)[:, None] * axis.group_size + places).reshape(-1)


def permute(
    state: State,
    dims: Dims,
    axes: Mapping[str, Axis],
    units: Mapping[str, Units],
    *,
    back: bool = False,
) -> dict[str, Tensor]:
    """Permute the units of axes in every tensor that carries them, or move them back.

    Args:
        state: parameters or their gradients.
        dims: dimensions of each; those that are not known stay as they are.
        axes: all axes of the dimensions.
        units: the new order of each axis to permute.
        back: whether to apply the inverse.
    """
    permuted: dict[str, Tensor] = {}
    for name, value in state.items():
        moved = value
        for position, dim in enumerate(dims[name]):
            if dim is None or not any(segment.axis in units for segment in dim.segments):
                continue
            entries = dim.entries(axes, units)
            if back:
                entries = np.argsort(entries)  # the inverse of a permutation
            moved = moved.index_select(position, torch.from_numpy(entries))
        permuted[name] = moved
    return permuted
