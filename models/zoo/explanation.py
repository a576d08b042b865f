"""Explains to the author of a model why its layout fails, and what to do.

An explanation names the axis, a tensor, the first module with a different result, and remedies.
Remedies that change the request for an axis have been tried.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from models.axes import Axis
from models.zoo.entry_order import with_fixed_axes
from models.zoo.growth import Place
from models.zoo.permuting import derangement_of, permute
from models.zoo.proof import TOLERANCE, ProofTask, Refutation, Variant
from models.zoo.randomized_model import RandomizedModel, State
from models.zoo.remedies import Trials, one_name, other_forms

_TORCH = str(Path(torch.__file__).parent)
_NO_REMEDY = "no other request of the cut was found to hold; build it with one size at every width"


def explain(refutation: Refutation, task: ProofTask, trials: Trials) -> str:
    """Return why an axis cannot be cut as declared, and what to do.

    Args:
        refutation: the result of `prove_layout`.
        task: its input.
        trials: tries remedies on the architecture.
    """
    # NaN or changing outputs make every comparison below meaningless, so they are explained first.
    problem = _explain_nan(task) or _explain_changing_outputs(task.whole.model, task)
    if problem is not None:
        return problem
    axis = task.dimensions.axes[refutation.axis]
    fault = _fixed_size(refutation, task, axis)
    if fault is not None:
        # No other form of the axis helps if a module has its size as a constant.
        return f"{fault.problem}; {fault.remedy}"
    fault = _unreadable_order(refutation, task, axis) or _fixed_places(refutation, task, axis)
    joined = one_name(task, axis, trials)
    if joined:
        return f"{fault.problem}; {joined}"
    remedies = [*other_forms(task, axis, trials)]
    if not fault.remedy:
        remedies += _other_uses(task, axis, trials)
    else:
        remedies.append(fault.remedy)
    return f"{fault.problem}; {', or '.join(remedies) or _NO_REMEDY}"


@dataclass(frozen=True)
class _Fault:
    """The problem of an axis, and the remedy if no other form of it works."""

    problem: str
    remedy: str  # "" if it depends on how the units are used


# ------------------------------------------------------------- results that are not numbers


def _explain_nan(task: ProofTask) -> str | None:
    """Name where NaN arises, in the whole model or in gradients of any variant."""
    place = _first_nan(task)
    if place is None:
        return None
    return (
        f"the model computes NaN from ordinary random numbers {place}; keep the arguments of"
        " logarithms, roots and fractional powers above 0, for example with x.clamp(min=1e-6)"
    )


def _first_nan(task: ProofTask) -> str | None:
    model = task.whole.model
    for output in _module_outputs(model, model.parameters):
        if bool(output.numbers.isnan().any()):
            return f"in or before module {output.path or 'the model'} ({output.kind})"
    for variant in task.variants:
        for name, gradient in variant.before.gradients.items():
            if bool(gradient.isnan().any()):
                return f"in the gradient of {name}"
    return None


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


def _explain_changing_outputs(model: RandomizedModel, task: ProofTask) -> str | None:
    """Return why the model gives different results when it runs again; None if it does not."""
    first = task.whole.before.outputs
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


# ------------------------------------------------------------- units that cannot be permuted


def _unreadable_order(refutation: Refutation, task: ProofTask, axis: Axis) -> _Fault | None:
    """Return a dimension in which the entries of an axis have no sliceable order."""
    for place in task.dimensions.places_of(axis):
        name, position = place
        if refutation.dims[name][position] is None:
            entries = task.growth[place][axis.name] * axis.group_size
            return _Fault(
                f"dimension {position} of {name} has {task.dimensions.size(place)} entries, "
                f"{entries} of them of axis {axis.name}, in no order that can be sliced",
                "give each part its own parameter",
            )
    return None


def _fixed_size(refutation: Refutation, task: ProofTask, axis: Axis) -> _Fault | None:
    """Return a module that takes the units of an axis, but has their number as a constant.

    Its weight has an input dimension with the length of the axis that no axis changes.
    """
    for variant in task.variants:
        output = _first_changed_output(refutation, variant, axis)
        if output is None:
            continue
        name = f"{output.path}.weight"
        place = (name, 1)
        shape = task.dimensions.shapes.get(name, ())
        is_fixed = len(shape) > 1 and not task.dimensions.growth.get(place)
        # A multiple of the axis may be the axis with several entries for each unit.
        if not is_fixed or shape[1] % axis.size:
            continue
        return _Fault(
            f"module {output.path} ({output.kind}) takes {shape[1]} inputs at every width, but"
            f" its inputs are the units of axis {axis.name}, of which the whole model has"
            f" {axis.size}",
            f"take this size from cut, like that of axis {axis.name}, instead of writing"
            f" {shape[1]}",
        )
    return None


def _fixed_places(refutation: Refutation, task: ProofTask, axis: Axis) -> _Fault:
    """Return the module and the tensor that show that units are not interchangeable."""
    module, tensor = _first_difference(refutation, task, axis)
    problem = (
        f"the units of axis {axis.name} are not interchangeable: permuting them in every tensor"
        f" that carries them, including {tensor}, changes the result by"
        f" {refutation.deviation:.2%} of its largest value, first in {module}"
    )
    return _Fault(problem, "")


def _other_uses(task: ProofTask, axis: Axis, trials: Trials) -> list[str]:
    """List what helps an axis whose units have fixed places."""
    remedies: list[str] = []
    if trials.accepts(replace(axis, leading=True)):
        remedies.append(
            "declare it with leading=True if its leading units are a valid model (only static"
            " plans support this)"
        )
    if len(task.whole.before.outputs) > 1:
        remedies.append(
            "instead of an output with its units, such as mu of a VAE, return the loss term per"
            " sample"
        )
    constant = _constant_of_size(task.whole.model.module, axis.size)
    if constant is not None:
        remedies.append(
            f"make {constant} a parameter whose entries belong to the units (with"
            " requires_grad=False if it does not train)"
        )
    return remedies


def _constant_of_size(module: nn.Module, size: int) -> str | None:
    """Return a buffer, or else a tensor attribute, with a dimension of this size."""
    for name, buffer in module.named_buffers():
        if size in buffer.shape:
            return f"buffer {name}"
    for layer in module.modules():
        for name, value in vars(layer).items():
            if isinstance(value, Tensor) and size in value.shape:
                return f"attribute {name}"
    return None


def _first_difference(refutation: Refutation, task: ProofTask, axis: Axis) -> tuple[str, str]:
    """Find the first module with different results, and a tensor in it that has the axis."""
    carriers = task.dimensions.places_of(axis)
    for variant in task.variants:
        output = _first_changed_output(refutation, variant, axis)
        if output is not None:
            is_usual = len(variant.model.samples) == len(task.whole.model.samples)
            rarity = "" if is_usual else ", for rare numbers or tokens"
            module = f"module {output.path or 'the model'} ({output.kind}){rarity}"
            return module, _tensor_in(output.path, carriers)
    # Equal outputs, so only the gradients differ.
    return "the gradients of a training step", carriers[0][0]


def _tensor_in(path: str, carriers: Sequence[Place]) -> str:
    """Return the first of the tensors that a module has, or the first of all."""
    for name, _ in carriers:
        if not path or name.startswith(f"{path}."):
            return name
    return carriers[0][0]


class _ModuleOutput(NamedTuple):
    """The result of a module in one call."""

    path: str
    kind: str
    numbers: Tensor  # sorted, because a permutation of units may change their order


def _first_changed_output(
    refutation: Refutation, variant: Variant, axis: Axis
) -> _ModuleOutput | None:
    """Find the first output that changes when the units of an axis are permuted."""
    model = variant.model
    dims = refutation.dims
    # A derangement moves every unit, so none hides a difference.
    units = {axis.name: derangement_of(variant.axes[axis.name], 0)}
    axes = with_fixed_axes(variant.axes, dims)
    before = _module_outputs(model, model.parameters)
    after = _module_outputs(model, permute(model.parameters, dims, axes, units))
    for old, new in zip(before, after, strict=False):
        if old.numbers.shape != new.numbers.shape:
            return old
        change = float((old.numbers - new.numbers).abs().max())
        # Relative to the largest value, because rounding grows with it.
        if change > TOLERANCE * float(old.numbers.abs().max()):
            return old
    return None


def _module_outputs(model: RandomizedModel, parameters: State) -> list[_ModuleOutput]:
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

    outputs: list[_ModuleOutput] = field(default_factory=list)

    def hook_of(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        """Return a forward hook for the module at a path."""

        def record(module: nn.Module, _: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point() and output.numel():
                numbers = output.detach().flatten().sort().values
                self.outputs.append(_ModuleOutput(path, type(module).__name__, numbers))

        return record
