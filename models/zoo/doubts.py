"""What a user reads when a layout does not hold, or a model has none: axis, tensor, module, and a
tried remedy.
"""

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from fleet_protocol.errors import ConfigError
from models.architecture import Architecture
from models.axes import Axis
from models.dims import Dim
from models.zoo.arranging import whole_axes
from models.zoo.exchange import Dims, Subject, exchanged, turned
from models.zoo.proof import ALIKE, Case, Doubt, proved_dims

_MOST_TRIALS = 16
_TORCH = str(Path(torch.__file__).parent)
_WRAPPERS = (
    nn.DataParallel,
    nn.parallel.DistributedDataParallel,
    torch.jit.ScriptModule,
)


class _Drawing(TorchFunctionMode):
    """Notes which line of the user's file moves torch's random state first."""

    where = ""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        state = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        if not self.where and not torch.equal(state, torch.get_rng_state()):
            frames = reversed(traceback.extract_stack()[:-1])
            frame = next((item for item in frames if not item.filename.startswith(_TORCH)), None)
            if frame is not None:
                name = getattr(func, "__name__", str(func))
                self.where = f" ({name} in line {frame.lineno} of {Path(frame.filename).name})"
        return result


def explained(doubt: Doubt, case: Case, works: Callable[[Axis], bool]) -> str:
    """Say why an axis cannot be cut as it is declared, as `proved_dims` found, and what to do.

    Whether the architecture can be cut with another form of an axis is found by `works`.
    """
    subject = case.views[0].subject
    lost = next(
        (row for row in _numbers(subject, subject.state) if bool(row[2].isnan().any())),
        None,
    )
    where = None if lost is None else f"in or before module {lost[0] or 'the model'} ({lost[1]})"
    steep = (
        name
        for view in case.views
        for name, slope in view.before.gradients.items()
        if bool(slope.isnan().any())
    )
    if where is None and (first_of := next(steep, None)) is not None:
        where = f"in the gradient of {first_of}"
    if where is not None:
        return (
            f"NaN arises from ordinary numbers, with which layouts are proved, {where}; keep what goes into logarithms,"
            " roots and broken powers above 0, as x.clamp(min=1e-6) does"
        )
    first = case.views[0].before.outputs
    kept = _kept(subject.module)
    state = torch.get_rng_state()
    drawing = _Drawing()
    x = subject.x.clone()
    with drawing:
        again = subject.run(gradients=False).outputs
    if not all(torch.allclose(one, other) for one, other in zip(first, again, strict=True)):
        if not torch.equal(x, subject.x):
            return "the model writes into its input, which others read, too; let its forward begin with x = x.clone()"
        moved = [name for name, value in _kept(subject.module).items() if kept.get(name) != value]
        if moved and torch.equal(state, torch.get_rng_state()):
            return (
                f"the model computes something else each time it runs, and {moved[0]} changes with each; a graph keeps"
                " nothing between two batches, so compute from the batch alone"
            )
        return (
            f"the model computes something else each time it runs, so it draws random numbers{drawing.where}; let a"
            " NoiseLayer of models.zoo.dropout draw them, and only in training: its uniform(x) becomes an input of the"
            " graph"
        )
    axis = case.axes[doubt.axis]
    carriers = [place for place, moved in case.growth.items() if axis.name in moved]
    unread = next((place for place in carriers if doubt.dims[place[0]][place[1]] is None), None)
    if unread is not None:
        name, position = unread
        what = (
            f"dimension {position} of {name} has {case.shapes[name][position]} entries,"
            f" {case.growth[unread][axis.name] * axis.group_size} of them of axis {axis.name}, in no order that can be"
            " sliced"
        )
        last = "give each part a parameter of its own"
    else:
        module, tensor = _where(case, doubt.dims, axis, [name for name, _ in carriers])
        what = (
            f"units of axis {axis.name} are not interchangeable: when they change places in every tensor that carries"
            f" them, {tensor} among these, the model computes something else (by {doubt.deviation:.2%} of its largest"
            f" value), first in {module}"
        )
        last = "declare it with leading=True if its leading units alone make sense (for static plans, no others)"
        if len(first) > 1:
            last += "; of an output that has its units, as mu of a VAE, return what the loss makes of it for each sample"
        plain = [(f"buffer {name}", value) for name, value in subject.module.named_buffers()]
        held = [item for layer in subject.module.modules() for item in vars(layer).items()]
        plain += [(f"attribute {name}", value) for name, value in held if isinstance(value, Tensor)]
        fixed = next((name for name, value in plain if axis.size in value.shape), None)
        if fixed is not None:
            last += (
                f", or make {fixed} a parameter, with requires_grad=False if nothing trains it, whose places go with"
                " the units"
            )
    return f"{what}; {', or '.join([*_remedies(case, axis, works), last])}"


def _kept(module: nn.Module) -> dict[str, Any]:
    """What the modules keep beside parameters, buffers and PyTorch's own, to be compared."""
    return {
        f"{name} of module {path or 'the model'} ({type(layer).__name__})": id(value)
        if isinstance(value, Tensor)
        else repr(value)
        for path, layer in module.named_modules()
        for name, value in vars(layer).items()
        if not name.startswith("_") and not isinstance(value, nn.Module)
    }


def _remedies(case: Case, axis: Axis, works: Callable[[Axis], bool]) -> Iterator[str]:
    """Other ways to declare the axis with which the layout holds."""
    counts = [
        number
        for number in range(2, axis.size)
        if axis.size % number == 0 and number % axis.groups == 0
    ]
    for groups in counts[:_MOST_TRIALS]:
        times = groups // axis.groups
        inside = replace(axis, groups=groups, leading=False)
        if times > 1 and _holds(case, inside, times, 1) and (axis.groups > 1 or works(inside)):
            yield f"cut inside its groups: cut.heads({axis.name!r}, {groups}, {axis.size // groups}) * {groups}"
            break
    for groups in [axis.groups] if axis.groups > 1 else counts[-_MOST_TRIALS:][::-1]:
        whole = Axis(axis.name, groups)
        if _holds(case, whole, axis.size // groups, axis.groups) and (
            axis.groups > 1 or works(whole)
        ):
            yield f"cut whole groups: cut.groups({axis.name!r}, {groups}) * {axis.size // groups}"
            break


def _holds(case: Case, axis: Axis, times: int, parts: int) -> bool:
    """Whether the layout holds with another form of an axis, each of whose places has times / parts
    the entries.
    """
    growth = {
        place: {
            name: entries * times // parts if name == axis.name else entries
            for name, entries in row.items()
        }
        for place, row in case.growth.items()
    }
    whole = case.views[0]
    found = proved_dims(Case((replace(whole, axes={**whole.axes, axis.name: axis}),), growth))
    if isinstance(found, Doubt):
        return False
    # What had one entry for each unit has the entries of a whole group side by side, or those of
    # each place apart.
    old = case.axes[axis.name]
    single = {
        found.dims[name][position]
        for (name, position), moved in case.growth.items()
        if moved == {axis.name: old.groups}
    }
    # Where nothing has, other parts of what lies in a group may change places, as halves of heads,
    # and look like it.
    usual = Dim(axis.name, old.size // (axis.size if axis.groups == 1 else old.size))
    return single == {usual} or (not single and old.groups == 1)


def _where(case: Case, dims: Dims, axis: Axis, carriers: list[str]) -> tuple[str, str]:
    """The first module whose outputs are other numbers, and a tensor of it that carries the axis."""
    for view in case.views:
        subject = view.subject
        units = {axis.name: turned(view.axes[axis.name], 0)}
        before = _numbers(subject, subject.state)
        after = _numbers(
            subject, exchanged(subject.state, dims, whole_axes(view.axes, dims), units)
        )
        for (path, kind, old), (_, _, new) in zip(before, after, strict=False):
            if old.shape != new.shape or float((old - new).abs().max()) > ALIKE * float(
                old.abs().max()
            ):
                own = [name for name in carriers if not path or name.startswith(f"{path}.")]
                rare = (
                    ""
                    if len(subject.x) == len(case.subject.x)
                    else ", with numbers or tokens that are rare"
                )
                return f"module {path or 'the model'} ({kind}){rare}", (own or carriers)[0]
    return "the gradients of a training step", carriers[0]


def _numbers(subject: Subject, state: Mapping[str, Tensor]) -> list[tuple[str, str, Tensor]]:
    """What each module returned, in the order of the calls, its numbers sorted: their order may
    change.
    """
    found: list[tuple[str, str, Tensor]] = []

    def hook(path: str) -> Any:
        def record(module: nn.Module, _: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point() and output.numel():
                found.append(
                    (
                        path,
                        type(module).__name__,
                        output.detach().flatten().sort().values,
                    )
                )

        return record

    handles = [
        module.register_forward_hook(hook(path)) for path, module in subject.module.named_modules()
    ]
    try:
        with torch.no_grad():
            subject.run(state)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _functions(layer: nn.Module) -> Iterator[tuple[str, str]]:
    """The hooks and attributes of a layer that are functions with a module or tensor in them: no
    copy replaces it.
    """
    hooks = [*layer._forward_hooks.values(), *layer._forward_pre_hooks.values()]  # noqa: SLF001 - no public name
    given: list[tuple[str, Any, tuple[type, ...]]] = [
        ("a hook", hook, (nn.Module, Tensor, list, dict)) for hook in hooks
    ]
    given += [
        (f"attribute {name}", value, (nn.Module, Tensor)) for name, value in vars(layer).items()
    ]
    for what, function, kinds in given:
        if isinstance(function, FunctionType):
            held = [
                *inspect.getclosurevars(function).nonlocals.values(),
                *(function.__defaults__ or ()),
            ]
            if any(isinstance(value, kinds) for value in held):
                code = function.__code__
                yield (
                    what,
                    f"line {code.co_firstlineno} of {Path(code.co_filename).name}",
                )


def sliceable(arch: Architecture, module: nn.Module) -> nn.Module:
    """The module if it can be cut.

    Else raises a ConfigError that names layer or parameter, and what to do.
    """
    known = set(module.modules())
    for name, layer in module.named_modules():
        if isinstance(layer, _WRAPPERS) or hasattr(layer, "_orig_mod"):
            raise ConfigError(
                f"{arch.name}: {name or 'the model'} is a {type(layer).__name__} around the module that is wanted;"
                " return that one, without DataParallel, torch.compile or torch.jit"
            )
        if any(isinstance(hook, WeightNorm) for hook in layer._forward_pre_hooks.values()):  # noqa: SLF001 - no public name
            raise ConfigError(
                f"{arch.name}: {name or 'the model'} ({type(layer).__name__}) has torch.nn.utils.weight_norm, whose"
                " result no copy can have; use torch.nn.utils.parametrizations.weight_norm, which `shoal export"
                " --convert` puts there"
            )
        for key, value in vars(layer).items():
            items = value if isinstance(value, (list, tuple)) else ()
            if not known.issuperset(item for item in items if isinstance(item, nn.Module)):
                raise ConfigError(
                    f"{arch.name}: attribute {key} of {name or 'the model'} ({type(layer).__name__}) is a Python"
                    f" {type(value).__name__} of modules, whose parameters PyTorch does not know; make it an"
                    " nn.ModuleList"
                )
        for what, function in _functions(layer):
            raise ConfigError(
                f"{arch.name}: {what} of {name or 'the model'} ({type(layer).__name__}), {function}, holds a"
                " module, a tensor or a collection from outside, which stays the original's in every copy of the model;"
                " make it a method of the module (register_forward_hook(self.keep), say), whose copy has its own"
            )
        if isinstance(layer, _BatchNorm):
            raise ConfigError(
                f"{arch.name}: {name} is a {type(layer).__name__}, whose running averages cannot be merged across"
                " widths; `shoal export --convert` replaces it by StaticBatchNorm of models.zoo.layers, or use that"
            )
    for name, buffer in module.named_buffers():
        if buffer.layout != torch.strided:
            raise ConfigError(
                f"{arch.name}: buffer {name} is sparse; keep it dense, with .to_dense()"
            )
    held: dict[tuple[Any, Any], str] = {}
    for name, value in module.named_parameters():
        if isinstance(value, UninitializedParameter):
            raise ConfigError(f"{arch.name}: parameter {name} has no shape yet; use no lazy layers")
        other = held.setdefault((value.untyped_storage()._cdata, value.storage_offset()), name)  # noqa: SLF001 - likewise
        if other != name:
            raise ConfigError(
                f"{arch.name}: parameters {other} and {name} share their memory, which no copy of them does; let both"
                " layers have one nn.Parameter, without .data, or compute with one twice: F.linear(x, weight.T)"
            )
        if value._backward_hooks or value._post_accumulate_grad_hooks:  # noqa: SLF001 - likewise
            raise ConfigError(
                f"{arch.name}: parameter {name} has a hook on its gradient, which no copy of it has; register it in"
                " forward on a clone of it, to compute with, or bound gradients with clip_value of the recipe"
            )
        if value.dtype != torch.float32:
            raise ConfigError(
                f"{arch.name}: parameter {name} is {value.dtype}; parameters must be float32: leave"
                " .half(), .double() and dtype= out, and keep complex numbers as two real ones each"
            )
    return module
