"""Makes a copy of a model ready for tracing: its mode, operators in place of layers, and a record of where it is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.fx import traceback

from models.zoo.layers import Mode, StaticBatchNorm, set_mode
from trainer_export.operators import static_batch_norm

__all__ = ["norms_of", "prepared", "recorded_modules"]


class _OperatorNorm(nn.Module):
    """Stands in for a StaticBatchNorm in a train trace; same parameters, one operator."""

    def __init__(self, norm: StaticBatchNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        normal: Tensor = static_batch_norm(x, self.weight, self.bias, self.eps)
        return normal


def prepared(model: nn.Module, mode: Mode, *, operators: bool = False) -> nn.Module:
    """A copy of the model in a mode, optionally with its norms as operators."""
    model = set_mode(copy.deepcopy(model), mode)
    if operators:
        for path, norm in norms_of(model):
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, _OperatorNorm(norm))
    return model


def norms_of(model: nn.Module) -> list[tuple[str, StaticBatchNorm]]:
    """Paths and modules of the static batch norms of a model."""
    return [(path, m) for path, m in model.named_modules() if isinstance(m, StaticBatchNorm)]


@contextmanager
def recorded_modules(model: nn.Module) -> Iterator[None]:
    """While this holds, traced nodes remember the module that is running."""
    stack: list[tuple[str, type]] = []

    def enter(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, _: Any) -> None:
            stack.append((path, type(module)))
            traceback.current_meta["nn_module_stack"] = {str(i): entry for i, entry in enumerate(stack)}

        return hook

    def leave(*_: Any) -> None:
        stack.pop()
        traceback.current_meta["nn_module_stack"] = {str(i): entry for i, entry in enumerate(stack)}

    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(path)))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
