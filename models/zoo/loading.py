"""Loads the tensors of a run into the class that its author wrote, converted or not."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fleet_protocol.errors import ConfigError
from models.zoo.conversion import is_replaced
from models.zoo.restoring import Untouched


def load_weights(module: nn.Module, tensors: Mapping[str, Any]) -> None:
    """Load the tensors of a run into a fresh model of the user's own class, as it is before any
    conversion.

    Args:
        module: as its class makes it, for the tier that the tensors are of.
        tensors: float32, by the names that a safetensors file of `shoal export-weights` has:
            parameters, and statistics ``stat.<norm>.mean`` and ``.var``.

    Raises:
        ConfigError: tensors of the class are missing, or its state has no place for statistics that
            are there.
    """
    arrays = {
        name: value.numpy() if isinstance(value, Tensor) else value
        for name, value in tensors.items()
    }
    statistics = {name for name in arrays if name.startswith("stat.")}
    untouched = Untouched.of(module)
    ways = (
        untouched.restored(lambda _, layer: is_replaced(layer)),
        untouched.restored(lambda _path, _layer: False, converted=False),
    )
    fitting = [way for way in ways if not way.own.missing(arrays) and statistics <= way.own.needed]
    if not fitting:
        own = ways[0].own
        own.require(arrays)
        raise ConfigError(
            f"{own.problem or f'the class has no place for {min(statistics)}'}; build the class that was exported"
        )
    state = fitting[0].own.values(arrays, fitting[0].arrays(), 0)
    module.load_state_dict(
        {name: torch.from_numpy(np.array(value)) for name, value in state.items()}
    )
