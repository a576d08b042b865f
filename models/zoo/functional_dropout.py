"""Dropout that a model applies by a function, whose random numbers become an input of the graph.

Attention of many packages has no layer for the dropout of its weights: it passes a rate to
`torch.nn.functional.dropout`, or to attention in one call. One layer at the root of a model takes
the random numbers of all these calls, in their order.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from models.zoo.dropout import NoiseLayer, dropped

NAME = "functional_dropout"
"""Name of the layer at the root of a model."""


class FunctionalDropout(NoiseLayer):
    """Takes the random numbers of all functions of a model that drop entries in training."""

    def __init__(self, model: nn.Module) -> None:
        """Make the layer for a model, and let its runs use it."""
        super().__init__(rate=0.0)
        # A model may run inside itself, so there is a stack.
        self._modes: list[Any] = []  # entered, the last one innermost
        model.register_forward_pre_hook(self._begin)
        # Called after an error in the forward pass, too, or the mode would stay entered.
        model.register_forward_hook(self._end, always_call=True)
        model.add_module(NAME, self)

    @property
    @override
    def active(self) -> bool:
        return self.training

    def drop(self, x: Tensor, rate: float, leading: int | None = None) -> Tensor:
        """Return x with some entries 0, or whole parts behind the leading dimensions."""
        return dropped(x, self.uniform(x), rate, leading)

    def _begin(self, model: nn.Module, _: Any) -> None:
        mode: Any = _Dropping(self, is_training=model.training)
        self._modes.append(mode)
        mode.__enter__()

    def _end(self, *_: Any) -> None:
        self._modes.pop().__exit__(None, None, None)


class _Dropping(TorchFunctionMode):
    """Gives functions that drop entries the random numbers of a layer."""

    def __init__(self, layer: FunctionalDropout, *, is_training: bool) -> None:
        super().__init__()
        self.layer = layer
        self.is_training = is_training

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The functions keep their meaning in evaluation, where they drop nothing.
        rule = _RULES.get(func)
        if rule is not None and self.is_training:
            # In a proof the model trains and its noise layers do not: then nothing is dropped.
            drop = self.layer.drop if self.layer.active else _keep
            result = rule(drop, *args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return func(*args, **(kwargs or {}))


def _keep(x: Tensor, _rate: float, _leading: int | None = None) -> Tensor:
    return x


_Drop = Callable[..., Tensor]
"""Drops entries of a tensor by a rate, whole parts behind some leading dimensions if given."""


def _of_entries(leading: int | None) -> Callable[..., Any]:
    """Return the rule of a function that drops single entries or whole parts."""

    def rule(
        drop: _Drop, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        del inplace
        if not training or p == 0:
            # Without dropout the call needs no random numbers.
            return NotImplemented
        return drop(x, p, leading)

    return rule


def _attention(
    drop: _Drop,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attend in separate steps, with dropout between them."""
    # The fused call stays where it drops nothing.
    if dropout_p == 0:
        return NotImplemented
    if enable_gqa:
        # Each head of keys and values serves several heads of queries.
        repeats = query.shape[-3] // key.shape[-3]
        key = key.repeat_interleave(repeats, -3)
        value = value.repeat_interleave(repeats, -3)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ key.transpose(-2, -1) * factor
    if is_causal:
        # Positions after the query's own.
        size = (query.shape[-2], key.shape[-2])
        later = torch.ones(size, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return drop(scores.softmax(-1), dropout_p) @ value


_RULES: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        functional.dropout: _of_entries(None),
        functional.dropout1d: _of_entries(2),
        functional.dropout2d: _of_entries(2),
        functional.dropout3d: _of_entries(2),
        functional.scaled_dot_product_attention: _attention,
    }
)


def drops_by_functions(module: nn.Module, samples: Tensor) -> bool:
    """Return whether a model drops entries by functions in training; the model is changed.

    Args:
        module: the model, which is run once.
        samples: samples for that run, on the device of the model.

    Raises:
        Exception: whatever the model raises.
    """
    layer = FunctionalDropout(module)
    module.train()
    # The layer records the shapes of the numbers that are asked of it.
    layer.input_shapes = []
    with torch.no_grad():
        module(samples)
    return bool(layer.input_shapes)
