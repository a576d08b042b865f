"""Take the one tensor that a model returns, in an object or without a dimension of its numbers."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn


def single_output(returned: Any) -> Tensor | None:
    """Return the one float tensor in what a model returned.

    Anything else in it must not hold tensors that a loss could depend on. None, a cache of keys and
    values, and a number are allowed.

    Args:
        returned: a mapping, tuple, list or dataclass.

    Returns:
        The tensor; None if there is none, there are several, or it is something else.
    """
    tensors: list[Tensor] = []
    for entry in _entries(returned):
        if isinstance(entry, Tensor):
            tensors.append(entry)
        elif any(isinstance(inner, Tensor) for inner in _nested_entries(entry)):
            return None
    # By the dtype, because a method of a tensor would count among the calls of the model.
    floats = [tensor for tensor in tensors if tensor.dtype.is_floating_point]
    return floats[0] if len(floats) == 1 else None


def _entries(returned: Any) -> Iterable[Any]:
    if isinstance(returned, Mapping):
        return returned.values()
    if isinstance(returned, (tuple, list)):
        return returned
    if dataclasses.is_dataclass(returned) and not isinstance(returned, type):
        return [getattr(returned, field.name) for field in dataclasses.fields(returned)]
    return ()


def _nested_entries(entry: Any) -> Iterable[Any]:
    for inner in _entries(entry):
        yield inner
        yield from _nested_entries(inner)


def take_single_output(module: nn.Module) -> nn.Module:
    """Let a model return the one float tensor of what it returns, in place, and return the model.

    One number for each sample becomes a row of one. Anything else that it returns stays.
    """
    module.register_forward_hook(_replace_output)
    return module


def _replace_output(_module: nn.Module, _args: Any, returned: Any) -> Tensor | None:
    output = returned if isinstance(returned, Tensor) else single_output(returned)
    if output is None or output.dim() != 1:
        return output
    return output[:, None]
