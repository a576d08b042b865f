"""The initial state of a global model: the weights that a seed draws, and its buffers."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from models.architecture import Architecture
from models.cut import Cut
from models.zoo.builds import ModelBuilder
from models.zoo.layers import StaticBatchNorm


def initial_weights(
    arch: Architecture, settings: Mapping[str, Any] | None = None, seed: int = 0
) -> dict[str, NDArray[np.float32]]:
    """Draw the initial weights of a global model by a seed.

    The global random state of torch is left as it was.

    Returns:
        Float32 arrays in the order of registration, which are a function of the arguments for one
        release of torch.

    Raises:
        ConfigError: if a setting is unknown.
    """
    # The caller's random state stays as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = ModelBuilder(arch, settings).build(Cut())
    return {name: value.detach().numpy().copy() for name, value in module.named_parameters()}


def further_names(
    arch: Architecture, settings: Mapping[str, Any] | None = None
) -> dict[str, str | NDArray[np.generic]]:
    """Return what else the state of a global model has.

    Returns:
        For each further name of a shared parameter its first name, for each buffer its value, and
        for running statistics an empty string, as the model does not use them.
    """
    with torch.random.fork_rng(devices=[]):
        module = ModelBuilder(arch, settings).build(Cut())
    names: dict[str, str | NDArray[np.generic]] = {}
    for name, buffer in module.named_buffers(remove_duplicate=False):
        # NumPy does not have all float types of PyTorch, such as bfloat16.
        value = buffer.float() if buffer.is_floating_point() else buffer
        names[name] = value.numpy()
    for path, layer in module.named_modules():
        if isinstance(layer, StaticBatchNorm):
            names |= dict.fromkeys((f"{path}.running_mean", f"{path}.running_var"), "")
    # PyTorch lists a shared parameter under its first name only.
    first_names = {id(value): name for name, value in module.named_parameters()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first_name = first_names[id(parameter)]
        if first_name != name:
            names[name] = first_name
    return names
