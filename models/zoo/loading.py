"""Loads the tensors of a run into the original class, converted or not."""

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
        module: a new instance of the class for the tier of the tensors, without conversion.
        tensors: float32, by the names in a safetensors file of `shoal export-weights`: parameters,
            and statistics ``stat.<norm>.mean`` and ``.var``.

    Raises:
        ConfigError: tensors of the class are missing, or its state has no place for existing
            statistics.
    """
    arrays: dict[str, NDArray[Any]] = {}
    for name, value in tensors.items():
        arrays[name] = value.numpy() if isinstance(value, Tensor) else value
    # Which of the two the run has is not stored, so the names of its tensors decide.
    origin = _fitting_origin(OriginalModule.record(module), arrays)
    state = origin.own_class.values(arrays, origin.constant_arrays(), steps=0)
    copies = {name: torch.from_numpy(np.array(value)) for name, value in state.items()}
    module.load_state_dict(copies)


def _fitting_origin(original: OriginalModule, arrays: Mapping[str, NDArray[Any]]) -> Origin:
    """Detect from the tensors of a run whether the exported model was converted."""
    statistics: set[str] = set()
    for name in arrays:
        if name.startswith("stat."):
            statistics.add(name)
    converted = original.describe(lambda _, layer: is_replaced(layer))
    as_written = original.describe(lambda _path, _layer: False, converted=False)
    for origin in (converted, as_written):
        own_class = origin.own_class
        # Statistics without a place would be lost, so the description must use all of them.
        if not own_class.missing(arrays) and statistics <= own_class.needed:
            return origin
    # Raises if tensors are missing, which explains more than the error below.
    converted.own_class.require(arrays)
    problem = converted.own_class.problem or f"the class has no place for {min(statistics)}"
    raise ConfigError(f"{problem}; build the exported class")
