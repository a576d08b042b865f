"""Build models for the inference of a layout, mostly on torch's meta device.

Models on the meta device have shapes and no memory, so building them costs next to nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from fleet_protocol.errors import ConfigError
from models.architecture import Architecture, call_builder, needs_values
from models.cut import Cut
from models.inputs import Row
from models.zoo.growth import Shapes
from models.zoo.randomized_model import noise
from models.zoo.sliceable import check_sliceable

_FILLS = frozenset({Tensor.normal_, Tensor.uniform_, Tensor.fill_, Tensor.zero_})


@dataclass(frozen=True)
class ModelBuilder:
    """An architecture and the settings that its models are built with."""

    arch: Architecture
    settings: Mapping[str, Any] | None = None

    @property
    def row(self) -> Row:
        """What a sample is."""
        return self.arch.row(self.settings)

    def build(self, cut: Cut) -> nn.Module:
        """Build a model of the sizes of a cut.

        Raises:
            ConfigError: if the builder fails or returns no module.
        """
        module = call_builder(self.arch, cut, self.settings)
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"{self.arch.name} must return a torch module, not {type(module).__name__}"
            )
        return module

    def build_on_meta(self, cut: Cut) -> nn.Module:
        """Build a model on the meta device, or on the CPU if the builder computes with values."""
        try:
            with torch.device("meta"), SkippedInitialization():
                return self.build(cut)
        except ConfigError as error:
            if not needs_values(error):
                raise
        cut.forget()  # the builder computes with values, such as rates that grow with the depth
        with torch.random.fork_rng(devices=[]):
            return check_sliceable(self.arch, self.build(cut)).to("meta")

    def shapes(self, cut: Cut) -> Shapes:
        """Return the shapes of the model's parameters."""
        return shapes_of(self.build_on_meta(cut))


def shapes_of(module: nn.Module) -> Shapes:
    """Return the shape of each parameter, in the order of registration."""
    return {name: tuple(value.shape) for name, value in module.named_parameters()}


class SkippedInitialization(TorchFunctionMode):
    """Leaves tensors without memory as they are, and fills parameters with cheap noise.

    Drawing initial weights is most of what building a large model costs.
    """

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FILLS or getattr(func, "__module__", "") == nn.init.__name__:
            filled = args[0] if args else kwargs.get("tensor")
            if isinstance(filled, Tensor) and filled.is_meta:
                return filled
            if isinstance(filled, nn.Parameter):
                filled.data.copy_(noise(filled))
                return filled
        return func(*args, **kwargs)
