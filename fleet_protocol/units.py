"""Names the units of a sub-model whose values a device keeps from round to round.

In a tier with a moving window or with drawn units, a parameter has other units of the whole model
in each round. So the weights of such a tier come with the positions of their entries in the whole
model, for each parameter of which the device keeps values.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import RefusalReason, RefusedError
from fleet_protocol.manifest import Manifest
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


def read_units(path: Path, manifest: Manifest) -> dict[str, Positions]:
    """Return the positions that were sent with weights, by parameter.

    Args:
        path: file of the weights, verified by its digest before.
        manifest: the sub-model of these weights.

    Raises:
        BlobError: the file is damaged.
        RefusedError: positions are not those of the entries of a parameter.
    """
    positions: dict[str, Positions] = {}
    # A parameter's dimensions are in order, as `unit_tensors` wrote them.
    for key, tensor in open_tensors(path).items():
        if key.startswith(_PREFIX):
            _number, _, name = key.removeprefix(_PREFIX).partition("/")
            positions[name] = (*positions.get(name, ()), tensor)
    for spec in manifest.parameters:
        if spec.name in positions and not _fit(positions[spec.name], spec.shape, manifest.width):
            raise RefusedError(
                RefusalReason.BAD_SHAPE,
                f"the units that the server sent for {spec.name} of {manifest.tier} are not those"
                f" of an array of shape {list(spec.shape)}; update the server and this board to the"
                " same version",
            )
    return positions


def _fit(positions: Positions, shape: Sequence[int], width: float) -> bool:
    """Return whether positions can be those of the entries of a sub-model's parameter.

    A device keeps an array that ends behind the last position, so a position beyond every possible
    whole model is refused before anything is allocated.
    """
    if tuple(map(np.shape, positions)) != tuple((size,) for size in shape):
        return False
    for dim in positions:
        if dim.dtype != np.int64 or len(np.unique(dim)) < len(dim):
            return False
        if int(dim.min(initial=0)) < 0 or int(dim.max(initial=0)) >= _most_units(len(dim), width):
            return False
    return True


def _most_units(kept: int, width: float) -> int:
    """Return an upper bound of the units of a whole dimension of which a width keeps some.

    It keeps at least one unit of each group, and otherwise at most rounds down.
    """
    return math.ceil(2 * kept / width)
