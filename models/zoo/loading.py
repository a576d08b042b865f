"""Load the tensors of a run into the class that its author wrote, converted or not."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fleet_protocol.errors import ConfigError
from models.zoo.conversion import is_replaced
from models.zoo.origin import Origin, OriginalModule


def load_weights(module: nn.Module, tensors: Mapping[str, Any]) -> None:
    """Load the tensors of a run into a new model of the user's own class.

    Args:
        module: as its class makes it, for the tier that the tensors are of, without any conversion.
        tensors: float32, by the names that a safetensors file of `shoal export-weights` has:
            parameters, and statistics ``stat.<norm>.mean`` and ``.var``.

    Raises:
        ConfigError: if tensors of the class are missing, or its state has no place for statistics
            that are there.
    """
    arrays: dict[str, NDArray[Any]] = {}
    for name, value in tensors.items():
        arrays[name] = value.numpy() if isinstance(value, Tensor) else value
    origin = _fitting_origin(OriginalModule.record(module), arrays)
    state = origin.own_class.values(arrays, origin.constant_arrays(), steps=0)
    copies = {name: torch.from_numpy(np.array(value)) for name, value in state.items()}
    module.load_state_dict(copies)


def _fitting_origin(original: OriginalModule, arrays: Mapping[str, NDArray[Any]]) -> Origin:
    """Find out from the tensors of a run whether the exported model was converted."""
    statistics: set[str] = set()
    for name in arrays:
        if name.startswith("stat."):
            statistics.add(name)
    converted = original.describe(lambda _, layer: is_replaced(layer))
    as_written = original.describe(lambda _path, _layer: False, converted=False)
    for origin in (converted, as_written):
        own_class = origin.own_class
        if not own_class.missing(arrays) and statistics <= own_class.needed:
            return origin
    converted.own_class.require(arrays)
    problem = converted.own_class.problem or f"the class has no place for {min(statistics)}"
    raise ConfigError(f"{problem}; build the class that was exported")
