"""Explains why a model gives different results when it runs again."""

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from models.zoo.randomized_model import RandomizedModel

_TORCH = str(Path(torch.__file__).parent)


# ---------------------------------------------------- outputs that change from run to run


class _RandomUse(TorchFunctionMode):
    """Records the first line of the user's file that changes torch's random state."""

    line = ""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        state = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        if not self.line and not torch.equal(state, torch.get_rng_state()):
            self.line = self._describe_caller(func)
        return result

    @staticmethod
    def _describe_caller(func: Any) -> str:
        # The last frames are this method and the one above.
        for frame in reversed(traceback.extract_stack()[:-2]):
            if not frame.filename.startswith(_TORCH):
                name = getattr(func, "__name__", str(func))
                return f" ({name} in line {frame.lineno} of {Path(frame.filename).name})"
        return ""


def explain_changing_outputs(model: RandomizedModel, first: Sequence[Tensor]) -> str | None:
    """Return why the model gives different results when it runs again; None if it does not.

    Args:
        model: the model.
        first: its outputs in the first run.
    """
    kept = _kept_values(model.module)
    random_state = torch.get_rng_state()
    random_use = _RandomUse()
    samples = model.samples.clone()
    with random_use:
        second = model.run(gradients=False).outputs
    if all(torch.allclose(old, new) for old, new in zip(first, second, strict=True)):
        return None
    if not torch.equal(samples, model.samples):
        return (
            "the model writes into its input, which other code reads, too; start its forward"
            " with x = x.clone()"
        )
    changed = _changed_names(kept, _kept_values(model.module))
    if changed and torch.equal(random_state, torch.get_rng_state()):
        return (
            f"the model gives different results each time it runs, and {changed[0]} changes each"
            " time; a graph keeps no state between batches, so compute only from the batch"
        )
    return (
        "the model gives different results each time it runs, so it draws random"
        f" numbers{random_use.line}; draw them with a NoiseLayer of models.zoo.dropout, only in"
        " training: its uniform(x) becomes an input of the graph"
    )


def _kept_values(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of modules besides parameters, buffers and PyTorch's own."""
    kept: dict[str, Any] = {}
    for path, layer in module.named_modules():
        owner = f"module {path or 'the model'} ({type(layer).__name__})"
        for name, value in vars(layer).items():
            if not name.startswith("_") and not isinstance(value, nn.Module):
                described = id(value) if isinstance(value, Tensor) else repr(value)
                kept[f"{name} of {owner}"] = described
    return kept


def _changed_names(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    changed: list[str] = []
    for name, value in after.items():
        if before.get(name) != value:
            changed.append(name)
    return changed
