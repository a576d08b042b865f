"""Names the units of a sub-model whose values a device keeps from round to round.

In a tier with a moving window or with drawn units, a parameter has other units of the whole model
in each round. So the weights of such a tier come with the positions of their entries in the whole
model, for each parameter of which the device keeps values.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.mapped_tensors import open_tensors
from fleet_protocol.weights import BESIDE_PARAMETERS

Positions = tuple[NDArray[np.int64], ...]
"""For each dimension of a parameter, the positions of its entries in the whole model."""

NO_UNITS: Mapping[str, Positions] = MappingProxyType({})

_PREFIX = f"{BESIDE_PARAMETERS}units/"


def unit_tensors(positions: Mapping[str, Sequence[NDArray[np.int64]]]) -> dict[str, NDArray[Any]]:
    """Return the tensors that are sent beside weights, from the positions by parameter."""
    tensors: dict[str, NDArray[Any]] = {}
    for name, dims in positions.items():
        for number, dim in enumerate(dims):
            tensors[f"{_PREFIX}{number}/{name}"] = dim
    return tensors


def fit(positions: Positions, shape: Sequence[int]) -> bool:
    """Return whether positions are those of the entries of an array of a shape."""
    if tuple(map(np.shape, positions)) != tuple((size,) for size in shape):
        return False
    return all(dim.dtype == np.int64 and int(dim.min(initial=0)) >= 0 for dim in positions)


def read_units(path: Path) -> dict[str, Positions]:
    """Return the positions that were sent with weights, by parameter.

    Args:
        path: file of the weights, verified by its digest before.

    Raises:
        BlobError: the file is damaged.
    """
    positions: dict[str, Positions] = {}
    # A parameter's dimensions are in order, as `unit_tensors` wrote them.
    for key, tensor in open_tensors(path).items():
        if key.startswith(_PREFIX):
            _number, _, name = key.removeprefix(_PREFIX).partition("/")
            positions[name] = (*positions.get(name, ()), tensor)
    return positions
