"""Explain to the author of a model why its layout does not hold, and what to do.

An explanation names the axis, a tensor, the first module that computes something else, and
remedies. Remedies that change how an axis is asked for were tried.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from models.zoo.remedies import other_forms

_TORCH = str(Path(torch.__file__).parent)


def explain(refutation: Refutation, task: ProofTask, is_accepted: Callable[[Axis], bool]) -> str:
    """Say why an axis cannot be cut as it is declared, and what to do.

    Args:
        refutation: what `prove_layout` found.
        task: what it was given.
        is_accepted: whether the architecture can be cut with another form of an axis.
    """
    problem = _explain_nan(task) or _explain_changing_outputs(task.whole.model, task)
    if problem is not None:
        return problem
    axis = task.dimensions.axes[refutation.axis]
    fault = _fixed_size(refutation, task, axis)
    if fault is not None:
        # No other form of the axis helps a module that has its size as a number.
        return f"{fault.problem}; {fault.remedy}"
    fault = _unreadable_order(refutation, task, axis) or _fixed_places(refutation, task, axis)
    remedies = [*other_forms(task, axis, is_accepted), fault.remedy]
    return f"{fault.problem}; {', or '.join(remedies)}"


@dataclass(frozen=True)
class _Fault:
    """What is wrong with an axis, and the remedy that is left if no other form of it holds."""

    problem: str
    remedy: str


# ------------------------------------------------------------- numbers that are no numbers


def _explain_nan(task: ProofTask) -> str | None:
    """Name where NaN arises, in the whole model or in gradients of any variant."""
    place = _first_nan(task)
    if place is None:
        return None
    return (
        f"NaN arises from ordinary numbers, with which layouts are proved, {place}; keep what goes "
        "into logarithms, roots and broken powers above 0, as x.clamp(min=1e-6) does"
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
    """Notes which line of the user's file changes torch's random state first."""

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
    """Say why the model computes something else when it runs once more; None if it does not."""
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
            "the model writes into its input, which others read, too; let its forward begin with "
            "x = x.clone()"
        )
    changed = _changed_names(kept, _kept_values(model.module))
    if changed and torch.equal(random_state, torch.get_rng_state()):
        return (
            f"the model computes something else each time it runs, and {changed[0]} changes with "
            "each; a graph keeps nothing between two batches, so compute from the batch alone"
        )
    return (
        "the model computes something else each time it runs, so it draws random numbers"
        f"{random_use.line}; let a NoiseLayer of models.zoo.dropout draw them, and only in "
        "training: its uniform(x) becomes an input of the graph"
    )


def _kept_values(module: nn.Module) -> dict[str, Any]:
    """Describe what modules keep beside parameters, buffers and PyTorch's own, to be compared."""
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
    """Name a dimension where the entries of an axis lie in no order that can be sliced."""
    for place in task.dimensions.places_of(axis):
        name, position = place
        if refutation.dims[name][position] is None:
            entries = task.growth[place][axis.name] * axis.group_size
            return _Fault(
                f"dimension {position} of {name} has {task.dimensions.size(place)} entries, "
                f"{entries} of them of axis {axis.name}, in no order that can be sliced",
                "give each part a parameter of its own",
            )
    return None


def _fixed_size(refutation: Refutation, task: ProofTask, axis: Axis) -> _Fault | None:
    """Name a module that takes the units of an axis, but has their number written into it.

    Its weight has a dimension of inputs as long as the axis, which no axis moves.
    """
    for variant in task.variants:
        output = _first_changed_output(refutation, variant, axis)
        if output is None:
            continue
        name = f"{output.path}.weight"
        place = (name, 1)
        shape = task.dimensions.shapes.get(name, ())
        is_fixed = len(shape) > 1 and not task.dimensions.growth.get(place)
        if not is_fixed or shape[1] % axis.size:
            continue
        return _Fault(
            f"module {output.path} ({output.kind}) takes {shape[1]} inputs at every width, and "
            f"the units of axis {axis.name}, of which the whole model has {axis.size}, go into it",
            f"ask cut for this size, as for that of axis {axis.name}, instead of writing "
            f"{shape[1]}",
        )
    return None


def _fixed_places(refutation: Refutation, task: ProofTask, axis: Axis) -> _Fault:
    """Name the module and the tensor that show that units are not interchangeable."""
    module, tensor = _first_difference(refutation, task, axis)
    problem = (
        f"units of axis {axis.name} are not interchangeable: when they change places in every "
        f"tensor that carries them, {tensor} among these, the model computes something else (by "
        f"{refutation.deviation:.2%} of its largest value), first in {module}"
    )
    remedy = (
        "declare it with leading=True if its leading units alone make sense (for static plans, no "
        "others)"
    )
    if len(task.whole.before.outputs) > 1:
        remedy += (
            "; of an output that has its units, as mu of a VAE, return what the loss makes of it "
            "for each sample"
        )
    constant = _constant_of_size(task.whole.model.module, axis.size)
    if constant is not None:
        remedy += (
            f", or make {constant} a parameter, with requires_grad=False if nothing trains it, "
            "whose places go with the units"
        )
    return _Fault(problem, remedy)


def _constant_of_size(module: nn.Module, size: int) -> str | None:
    """Name a buffer, or else a tensor attribute, that has a dimension of a size."""
    for name, buffer in module.named_buffers():
        if size in buffer.shape:
            return f"buffer {name}"
    for layer in module.modules():
        for name, value in vars(layer).items():
            if isinstance(value, Tensor) and size in value.shape:
                return f"attribute {name}"
    return None


def _first_difference(refutation: Refutation, task: ProofTask, axis: Axis) -> tuple[str, str]:
    """Find the first module that computes other numbers, and a tensor in it that has the axis."""
    carriers = task.dimensions.places_of(axis)
    for variant in task.variants:
        output = _first_changed_output(refutation, variant, axis)
        if output is not None:
            is_usual = len(variant.model.samples) == len(task.whole.model.samples)
            rarity = "" if is_usual else ", with numbers or tokens that are rare"
            module = f"module {output.path or 'the model'} ({output.kind}){rarity}"
            return module, _tensor_in(output.path, carriers)
    return "the gradients of a training step", carriers[0][0]


def _tensor_in(path: str, carriers: Sequence[Place]) -> str:
    """Return the first of some tensors that a module has; the first of all if it has none."""
    for name, _ in carriers:
        if not path or name.startswith(f"{path}."):
            return name
    return carriers[0][0]


class _ModuleOutput(NamedTuple):
    """What a module returned in one call."""

    path: str
    kind: str
    numbers: Tensor  # sorted, as their order may change when units change places


def _first_changed_output(
    refutation: Refutation, variant: Variant, axis: Axis
) -> _ModuleOutput | None:
    """Find the first output that has other numbers when the units of an axis change places."""
    model = variant.model
    dims = refutation.dims
    units = {axis.name: derangement_of(variant.axes[axis.name], 0)}
    axes = with_fixed_axes(variant.axes, dims)
    before = _module_outputs(model, model.parameters)
    after = _module_outputs(model, permute(model.parameters, dims, axes, units))
    for old, new in zip(before, after, strict=False):
        if old.numbers.shape != new.numbers.shape:
            return old
        change = float((old.numbers - new.numbers).abs().max())
        if change > TOLERANCE * float(old.numbers.abs().max()):
            return old
    return None


def _module_outputs(model: RandomizedModel, parameters: State) -> list[_ModuleOutput]:
    """Run a model and list what each module returned, in the order of the calls."""
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
