"""The call of a model that a package defines: a batch goes in, and one tensor comes out.

Hooks do this, so the module stays the package's own class, with the names of its parameters.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fleet_protocol.errors import ModelError

Mask = Literal["none", "padding", "scores", "causal"]
"""Which attention mask is made of the tokens: none; one per token, 1 for a token and 0 for
padding; one to add to the scores, which hides padding; or one that hides later tokens, too."""

_LOGITS = "logits"


@dataclass(frozen=True)
class PackageCall:
    """How a batch becomes the arguments of `forward`.

    As a forward pre-hook of a module it replaces the batch by keywords. If a call already
    has keywords, as for a model with several named inputs, it gets only the constants.
    """

    sample: str = ""  # the argument that takes the batch; "" for the first
    mask: Mask = "none"
    mask_name: str = "attention_mask"
    padding: int = 0  # the token that stands for none
    constants: Mapping[str, Any] = field(default_factory=dict)  # further arguments

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of `forward`."""
        keywords = {**self.constants, **kwargs}
        if not args:
            return args, keywords
        batch = args[0]
        if self.mask != "none":
            keywords[self.mask_name] = self._mask_of(batch)
        if self.sample:
            keywords[self.sample] = batch
            return (), keywords
        return args, keywords

    def _mask_of(self, tokens: Tensor) -> Tensor:
        """Make the mask of int64 tokens [batch, length]."""
        present = tokens != self.padding
        if self.mask == "padding":
            return present.to(torch.int64)
        length = tokens.shape[1]
        hidden = (~present)[:, None, None, :].to(torch.float32)
        # An upper triangle without the diagonal: a token sees itself and those before it.
        later = torch.ones((length, length)).triu(1) if self.mask == "causal" else None
        if later is None:
            hidden = hidden.expand(-1, 1, length, length)
        else:
            hidden = torch.maximum(hidden, later)
        return hidden * torch.finfo(torch.float32).min


@dataclass(frozen=True)
class PackageOutput:
    """Takes one tensor of what `forward` returns, as a forward hook."""

    name: str = ""  # of a field or key; "" for the logits, or for the only tensor

    def __call__(self, _module: nn.Module, _args: Any, returned: Any) -> Any:
        """Return the tensor, or the whole value if it has no single one."""
        if isinstance(returned, Tensor) and not self.name:
            return returned
        fields = outputs_of(returned)
        if self.name:
            if self.name not in fields:
                there_are = f"there are {', '.join(fields) or 'none with names'}"
                if isinstance(returned, Tensor):
                    there_are = "it returns one tensor, so leave out output_name"
                raise ModelError(f"the model returns no output {self.name!r}; {there_are}")
            return fields[self.name]
        if _LOGITS in fields:
            return fields[_LOGITS]
        return next(iter(fields.values())) if len(fields) == 1 else returned


def outputs_of(returned: Any) -> dict[str, Tensor]:
    """Return the tensors of a mapping, a named tuple, a tuple or an object, by name.

    A tensor by itself has no name, so nothing is returned for it.
    """
    fields: Mapping[str, Any]
    if isinstance(returned, Tensor):
        fields = {}
    elif isinstance(returned, Mapping):
        fields = returned
    elif hasattr(returned, "_asdict"):
        fields = returned._asdict()
    elif isinstance(returned, (tuple, list)):
        fields = {str(number): value for number, value in enumerate(returned)}
    else:
        fields = getattr(returned, "__dict__", {})
    tensors: dict[str, Tensor] = {}
    for name, value in fields.items():
        if isinstance(value, Tensor):
            tensors[name] = value
    return tensors


def further_inputs(module: nn.Module) -> list[str]:
    """List the arguments that a module's `forward` requires besides the batch and its mask.

    Args:
        module: a module whose call is adapted.
    """
    required: list[str] = []
    for name, parameter in inspect.signature(module.forward).parameters.items():
        has_name = parameter.kind in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}
        if has_name and parameter.default is parameter.empty:
            required.append(name)
    for call in module._forward_pre_hooks.values():  # noqa: SLF001 - no public name
        if isinstance(call, PackageCall):
            sample = call.sample or next(iter(required), "")
            given = {sample, call.mask_name, *call.constants}
            required = [name for name in required if name not in given]
    return required


def adapt_call(
    module: nn.Module, call: PackageCall | None = None, output: PackageOutput | None = None
) -> nn.Module:
    """Let a package's module take a batch and return one tensor, in place, and return it.

    Args:
        module: the module that its class makes.
        call: conversion of a batch into its arguments.
        output: which of its outputs is taken.
    """
    module.register_forward_pre_hook(call or PackageCall(), with_kwargs=True)
    module.register_forward_hook(output or PackageOutput())
    return module
