"""Builds models for the inference of a layout, mostly on torch's meta device.

Models on the meta device have shapes but no memory, so building them is cheap.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from fleet_protocol.errors import ConfigError
from models.architecture import Architecture, call_builder, naming_architecture
from models.cut import Cut
from models.inputs import Row
from models.zoo.growth import Shapes
from models.zoo.randomized_model import check_time, noise
from models.zoo.sliceable import check_sliceable

_FILLS = frozenset({Tensor.normal_, Tensor.uniform_, Tensor.fill_, Tensor.zero_})
# Packages adjust filled values, as timm does for a truncated normal distribution.
_ADJUSTMENTS = frozenset({Tensor.add_, Tensor.clamp_, Tensor.erfinv_, Tensor.mul_})


@dataclass(frozen=True)
class ModelBuilder:
    """An architecture and the settings of its models."""

    arch: Architecture
    settings: Mapping[str, Any] | None = None
    until: float = math.inf  # processor time after which its models are built and run no more
    # Returns what `shapes` does, for a caller that keeps the shapes of models; raises anything.
    known_shapes: Callable[[Cut], Shapes] | None = None

    @property
    def row(self) -> Row:
        """Return the layout of a sample."""
        return self.arch.row(self.settings)

    def build(self, cut: Cut) -> nn.Module:
        """Build a model with the sizes of a cut.

        Raises:
            ConfigError: the builder fails or does not return a module.
            TimeUpError: if its time is over.
        """
        check_time(self.until)
        module: nn.Module = call_builder(self.arch, cut, self.settings)
        return module

    def build_on_meta(self, cut: Cut) -> nn.Module:
        """Build a model on the meta device, or bring it there if its builder needs the CPU."""
        module = build_for_shapes(cut, self.build)
        if any(value.is_meta for value in module.parameters()):
            return module
        # A builder that put tensors on the CPU itself may have mixed both devices.
        return check_sliceable(self.arch, module).to("meta")

    def shapes(self, cut: Cut) -> Shapes:
        """Return the shapes of the model's parameters.

        Raises:
            ConfigError: the builder fails or does not return a module.
            TimeUpError: if its time is over.
        """
        if self.known_shapes is None:
            return shapes_of(self.build_on_meta(cut))
        check_time(self.until)
        with naming_architecture(self.arch):
            return self.known_shapes(cut)


def build_for_shapes(cut: Cut, build: Callable[[Cut], nn.Module]) -> nn.Module:
    """Build a model whose values do not matter, on the meta device where that is possible.

    A builder may compute with values, such as rates that grow with the depth, load weights, or put
    tensors on the CPU itself. The errors of these cases have nothing in common. So after any error
    except Shoal's own refusals, the model is built on the CPU, where it raises its own error if it
    fails.

    Args:
        cut: the sizes.
        build: builds the model of a cut.

    Raises:
        ConfigError: if the builder fails on the CPU, too.
    """
    try:
        with torch.device("meta"), SkippedInitialization():
            return build(cut)
    except ConfigError as error:
        # A refusal by Shoal itself would be the same on the CPU.
        if error.__cause__ is None or isinstance(error.__cause__, ConfigError):
            raise
    # The failed build has recorded axes already.
    cut.forget()
    with torch.random.fork_rng(devices=[]):
        return build(cut)


def shapes_of(module: nn.Module) -> Shapes:
    """Return the shape of each parameter, in the order of registration."""
    return {name: tuple(value.shape) for name, value in module.named_parameters()}


class CheapInitialization(TorchFunctionMode):
    """Draws normal initial weights as `noise` does, which repeats numbers of a large tensor.

    Unlike those of `SkippedInitialization`, they have the size that the model asks for, so it
    computes what it usually does.
    """

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not nn.init.normal_:
            return func(*args, **kwargs)
        drawn = inspect.signature(func).bind(*args, **kwargs)
        drawn.apply_defaults()
        filled = drawn.arguments["tensor"]
        if filled.is_meta:
            return filled
        with torch.no_grad():
            filled.copy_(noise(filled))
            return filled.mul_(drawn.arguments["std"]).add_(drawn.arguments["mean"])


class SkippedInitialization(TorchFunctionMode):
    """Fills parameters with cheap noise, and does not change tensors without memory.

    Drawing initial weights is most of what building a large model costs.
    """

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ADJUSTMENTS and args[0].is_meta:
            return args[0]
        if func in _FILLS or getattr(func, "__module__", "") == nn.init.__name__:
            filled = args[0] if args else kwargs.get("tensor")
            # Without memory there is nothing to fill.
            if isinstance(filled, Tensor) and filled.is_meta:
                return filled
            if isinstance(filled, nn.Parameter):
                filled.data.copy_(noise(filled))
                return filled
        return func(*args, **kwargs)
