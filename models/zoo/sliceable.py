"""Refuses modules that cannot be cut, and names the layer or parameter and the remedy.

A sub-model is a smaller copy of the module that takes slices of its parameters. So every tensor
that trains must be a dense float32 parameter that the module knows and shares with no other, and
nothing in the module may hold a part of the original.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.weight_norm import WeightNorm

from fleet_protocol.errors import ModelError
from models.architecture import Architecture
from models.zoo.layers import StaticBatchNorm

_WRAPPERS = (
    nn.DataParallel,
    nn.parallel.DistributedDataParallel,
    torch.jit.ScriptModule,
)


def check_sliceable(arch: Architecture, module: nn.Module) -> nn.Module:
    """Return the module if it can be cut.

    Raises:
        ConfigError: it cannot be cut; the message names the layer or parameter and the remedy.
    """
    for problem in _problems(module):
        raise ModelError(f"{arch.name}: {problem}")
    return module


def _problems(module: nn.Module) -> Iterator[str]:
    """Yield the problems of layers, then of buffers, then of parameters."""
    modules = set(module.modules())
    for path, layer in module.named_modules():
        for check in _LAYER_CHECKS:
            problem = check(_Layer(path, layer, modules))
            if problem is not None:
                yield problem
    for name, buffer in module.named_buffers():
        if buffer.layout != torch.strided:
            yield f"buffer {name} is sparse; make it dense with .to_dense()"
    yield from _parameter_problems(module)


@dataclass(frozen=True)
class _Layer:
    """A layer to check."""

    path: str
    module: nn.Module
    modules: set[nn.Module]  # all modules that the model has registered

    @property
    def kind(self) -> str:
        """The name of its class."""
        return type(self.module).__name__

    @property
    def title(self) -> str:
        """Its path, with its class."""
        return f"{self.path or 'the model'} ({self.kind})"


_LayerCheck = Callable[[_Layer], str | None]
"""Returns the problem of a layer, or None."""


def _check_wrapper(layer: _Layer) -> str | None:
    # torch.compile wraps a module in a class that is not public, but has this attribute.
    if isinstance(layer.module, _WRAPPERS) or hasattr(layer.module, "_orig_mod"):
        return (
            f"{layer.path or 'the model'} is a {layer.kind} that wraps the module; return the"
            " inner module, without DataParallel, torch.compile or torch.jit"
        )
    return None


def _check_weight_norm(layer: _Layer) -> str | None:
    hooks = layer.module._forward_pre_hooks.values()  # noqa: SLF001 - no public name
    if any(isinstance(hook, WeightNorm) for hook in hooks):
        return (
            f"{layer.title} has torch.nn.utils.weight_norm, which cannot be copied; use"
            " torch.nn.utils.parametrizations.weight_norm, which `shoal export --convert`"
            " inserts"
        )
    return None


def _check_collections(layer: _Layer) -> str | None:
    for key, value in vars(layer.module).items():
        if not isinstance(value, (list, tuple)):
            continue
        if any(isinstance(entry, nn.Module) and entry not in layer.modules for entry in value):
            return (
                f"attribute {key} of {layer.title} is a Python {type(value).__name__} of"
                " modules, whose parameters PyTorch does not register; use an nn.ModuleList"
            )
    return None


def _check_functions(layer: _Layer) -> str | None:
    for owner, function in _functions(layer.module):
        code = function.__code__
        line = f"line {code.co_firstlineno} of {Path(code.co_filename).name}"
        return (
            f"{owner} of {layer.title}, {line}, refers to a module, a tensor or a collection"
            " from outside, so every copy of the model would use the original's; use a method"
            " of the module instead, for example register_forward_hook(self.keep)"
        )
    return None


def _functions(layer: nn.Module) -> Iterator[tuple[str, FunctionType]]:
    """Yield hooks and attributes that are functions with a module or tensor in them."""
    hooks = [*layer._forward_hooks.values(), *layer._forward_pre_hooks.values()]  # noqa: SLF001
    for hook in hooks:
        if isinstance(hook, FunctionType) and _holds(hook, (nn.Module, Tensor, list, dict)):
            yield "a hook", hook
    for name, value in vars(layer).items():
        if isinstance(value, FunctionType) and _holds(value, (nn.Module, Tensor)):
            yield f"attribute {name}", value


def _holds(function: FunctionType, kinds: tuple[type, ...]) -> bool:
    """Return whether a function has a value of some types in its closure or its defaults."""
    enclosed = inspect.getclosurevars(function).nonlocals.values()
    defaults = function.__defaults__ or ()
    return any(isinstance(value, kinds) for value in (*enclosed, *defaults))


def _check_batch_norm(layer: _Layer) -> str | None:
    if isinstance(layer.module, _BatchNorm) and not isinstance(layer.module, StaticBatchNorm):
        return (
            f"{layer.path} is a {layer.kind}, whose running averages cannot be merged across"
            " widths; `shoal export --convert` replaces it with StaticBatchNorm of"
            " models.zoo.layers, or use that directly"
        )
    return None


_LAYER_CHECKS: tuple[_LayerCheck, ...] = (
    _check_wrapper,
    _check_weight_norm,
    _check_collections,
    _check_functions,
    _check_batch_norm,
)


def _parameter_problems(module: nn.Module) -> Iterator[str]:
    first_in_memory: dict[tuple[Any, Any], str] = {}
    for name, value in module.named_parameters():
        if isinstance(value, UninitializedParameter):
            yield f"parameter {name} has no shape yet; replace lazy layers by layers with sizes"
        # PyTorch has no public names for what is asked of storages and parameters here.
        memory = (value.untyped_storage()._cdata, value.storage_offset())  # noqa: SLF001
        first = first_in_memory.setdefault(memory, name)
        if first != name:
            yield (
                f"parameters {first} and {name} share their memory, but copies of them would"
                " not; give both layers the same nn.Parameter, without .data, or use one"
                " parameter twice: F.linear(x, weight.T)"
            )
        if value._backward_hooks or value._post_accumulate_grad_hooks:  # noqa: SLF001
            yield (
                f"parameter {name} has a hook on its gradient, but copies of it would not; in"
                " forward, register the hook on a clone and compute with the clone, or clip"
                " gradients with clip_value of the recipe"
            )
        if value.dtype != torch.float32:
            yield (
                f"parameter {name} is {value.dtype}; parameters must be float32: remove .half(),"
                " .double() and dtype=, and store complex numbers as two real ones"
            )
