"""Records what the modules of a model compute, and finds the first that a permutation changes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from models.axes import Axis
from models.zoo.entry_order import with_fixed_axes
from models.zoo.permuting import derangement_of, permute
from models.zoo.proof import TOLERANCE, Refutation, Variant
from models.zoo.randomized_model import RandomizedModel, State


class ModuleOutput(NamedTuple):
    """The result of a module in one call."""

    path: str
    kind: str
    numbers: Tensor  # sorted, because a permutation of units may change their order


def first_changed_output(
    refutation: Refutation, variant: Variant, axis: Axis
) -> ModuleOutput | None:
    """Find the first output that changes when the units of an axis are permuted."""
    model = variant.model
    dims = refutation.dims
    # A derangement moves every unit, so none hides a difference.
    units = {axis.name: derangement_of(variant.axes[axis.name], 0)}
    axes = with_fixed_axes(variant.axes, dims)
    before = module_outputs(model, model.parameters)
    after = module_outputs(model, permute(model.parameters, dims, axes, units))
    for old, new in zip(before, after, strict=False):
        if old.numbers.shape != new.numbers.shape:
            return old
        change = float((old.numbers - new.numbers).abs().max())
        # Relative to the largest value, because rounding grows with it.
        if change > TOLERANCE * float(old.numbers.abs().max()):
            return old
    return None


def module_outputs(model: RandomizedModel, parameters: State) -> list[ModuleOutput]:
    """Run a model and return the results of its modules in call order."""
    recorder = _OutputRecorder()
    handles = []
    for path, module in model.module.named_modules():
        handles.append(module.register_forward_hook(recorder.hook_of(path)))
    try:
        with torch.no_grad():
            model.run(parameters)
    finally:
        for handle in handles:
            handle.remove()
    return recorder.outputs


@dataclass(frozen=True)
class _OutputRecorder:
    """Collects float outputs of modules by hooks."""

    outputs: list[ModuleOutput] = field(default_factory=list)

    def hook_of(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        """Return a forward hook for the module at a path."""

        def record(module: nn.Module, _: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point() and output.numel():
                numbers = output.detach().flatten().sort().values
                self.outputs.append(ModuleOutput(path, type(module).__name__, numbers))

        return record
