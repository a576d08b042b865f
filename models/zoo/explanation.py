"""Explains to the author of a model why its layout fails, and what to do.

An explanation names the axis, a tensor, the first module with a different result, and remedies.
Remedies that change the request for an axis have been tried.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from models.axes import Axis
from models.zoo.changing_outputs import explain_changing_outputs
from models.zoo.growth import Place
from models.zoo.module_outputs import first_changed_output, module_outputs
from models.zoo.proof import ProofTask, Refutation
from models.zoo.remedies import Trials, one_name, other_forms

_NO_REMEDY = "no other request of the cut was found to hold; build it with one size at every width"


def explain(refutation: Refutation, task: ProofTask, trials: Trials) -> str:
    """Return why an axis cannot be cut as declared, and what to do.

    Args:
        refutation: the result of `prove_layout`.
        task: its input.
        trials: tries remedies on the architecture.
    """
    # NaN or changing outputs make every comparison below meaningless, so they are explained first.
    problem = _explain_nan(task) or explain_changing_outputs(
        task.whole.model, task.whole.before.outputs
    )
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
    for output in module_outputs(model, model.parameters):
        if bool(output.numbers.isnan().any()):
            return f"in or before module {output.path or 'the model'} ({output.kind})"
    for variant in task.variants:
        for name, gradient in variant.before.gradients.items():
            if bool(gradient.isnan().any()):
                return f"in the gradient of {name}"
    return None


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
        output = first_changed_output(refutation, variant, axis)
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
        output = first_changed_output(refutation, variant, axis)
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
