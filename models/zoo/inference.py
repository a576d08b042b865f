"""Infers the layout of a model by perturbation: build it with one axis larger, see what grows, and
prove the order.

So a user writes a plain torch module and only asks its `Cut` for sizes. All builds but those of the
initial weights and of buffers happen on torch's meta device and cost no memory.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from fleet_protocol.errors import ConfigError, PlanError
from models.architecture import Architecture, call_builder
from models.axes import Axis, AxisKind
from models.cut import CLASSES, Cut
from models.dims import Dim
from models.inputs import Row
from models.layout import HEAD, STEM, Layout, Parameter, Statistic, block_name
from models.user_lines import at_line_of
from models.zoo.arranging import whole_axes
from models.zoo.doubts import explained, sliceable
from models.zoo.exchange import Run, Subject, noise, samples, stretched, subject_of
from models.zoo.layers import StaticBatchNorm
from models.zoo.probing import Growth, Shapes, grown_with
from models.zoo.proof import Case, Doubt, View, proved_dims
from models.zoo.rare import rare_samples

_NARROW = (0.7, 0.5, 0.75, 0.3)  # odd sizes first: they tell most
_FILLS = frozenset({Tensor.normal_, Tensor.uniform_, Tensor.fill_, Tensor.zero_})
_STRETCHED = ((0.001, 0.0, 1.0), (1.0, 3.0, 1.0), (10.0, 0.0, 1.0), (1.0, 0.0, 10.0))
"""Scale and shift of samples, and the gain of parameters, at which units may differ that are alike
at usual sizes.
"""

_MORE_SAMPLES = 4
# parameters; beyond, gradients are compared on a narrower model alone, for a tenth of the cost
_LARGE = 1_000_000


def initial_weights(
    arch: Architecture, settings: Mapping[str, Any] | None = None, seed: int = 0
) -> dict[str, NDArray[np.float32]]:
    """Draw the initial weights of a global model by a seed.

    The global random state of torch is left as it was.

    They are float32, in registration order, and a function of the arguments for one release of
    torch.

    Raises:
        ConfigError: if a setting is unknown.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = _module(arch, Cut(), settings)
    return {name: value.detach().numpy().copy() for name, value in module.named_parameters()}


def further_names(
    arch: Architecture, settings: Mapping[str, Any] | None = None
) -> dict[str, str | NDArray[np.generic]]:
    """What else the state of a global model has: further names of its parameters to the first,
    buffers to their values.

    Running statistics have none, as the model does not use them.
    """
    with torch.random.fork_rng(devices=[]):
        module = _module(arch, Cut(), settings)
    first = {id(value): name for name, value in module.named_parameters()}
    names: dict[str, str | NDArray[np.generic]] = {
        name: (value.float() if value.is_floating_point() else value).numpy()
        for name, value in module.named_buffers(remove_duplicate=False)
    }
    for path, layer in module.named_modules():
        if isinstance(layer, StaticBatchNorm):
            names |= dict.fromkeys((f"{path}.running_mean", f"{path}.running_var"), "")
    further = {
        name: first[id(value)] for name, value in module.named_parameters(remove_duplicate=False)
    }
    return names | {name: known for name, known in further.items() if known != name}


def infer_layout(arch: Architecture, settings: Mapping[str, Any] | None = None) -> Layout:
    """Infer the layout of an architecture's global model; see `models.registry.infer_layout`."""
    return _inferred(arch, settings, lambda axis: _works(arch, settings, axis))


def _works(arch: Architecture, settings: Mapping[str, Any] | None, axis: Axis) -> bool:
    """Whether a layout is found with another form of an axis, as its author would declare it."""

    def build(cut: Cut, **chosen: Any) -> Any:
        cut.declare(axis)
        return arch.build(cut, **chosen)

    try:
        _inferred(replace(arch, build=build), settings, lambda _: False)
    except (ConfigError, PlanError):
        return False
    return True


def _inferred(
    arch: Architecture,
    settings: Mapping[str, Any] | None,
    works: Callable[[Axis], bool],
) -> Layout:
    cut = Cut()
    module = sliceable(arch, _meta_module(arch, cut, settings))
    shapes = _shapes(module)
    frozen = {
        name for name, value in module.named_parameters() if not value.requires_grad
    }  # a run may change it
    axes = dict(cut.axes)
    if CLASSES not in axes:
        raise ConfigError(
            f"{arch.name} never asked for cut.classes(n); its classifier must, or labels have no axis"
        )
    depth = 1 if cut.blocks is None else cut.blocks
    by_depth = None if cut.blocks is None else _blocks_by_depth(arch, settings, shapes, depth)
    growth = grown_with(
        arch.name,
        axes,
        lambda enlarge: _shapes(_meta_module(arch, Cut(enlarge=enlarge), settings)),
    )
    views = tuple(_views(arch, settings, module, axes, growth))
    row = arch.row(settings)
    case = Case(
        (*views, *_in_training(arch, views[0]), *_stretched(arch, views[-1], row)),
        growth,
    )
    found = proved_dims(case)
    if isinstance(found, Doubt):
        raise ConfigError(f"{arch.name}: {explained(found, case, works)}")
    dims = found.dims
    axes = whole_axes(axes, dims)
    blocks = _head_from_labels(shapes, dims) if by_depth is None else by_depth
    full = arch.settings(settings)
    parameters = [
        Parameter(name, shape, dims[name], blocks[name]) for name, shape in shapes.items()
    ]
    return Layout(
        arch=arch.name,
        settings=full,
        axes=axes,
        parameters=tuple(item for item in parameters if item.name not in frozen),
        base=tuple(item for item in parameters if item.name in frozen),
        statistics=tuple(
            Statistic(name, dims[f"{name}.weight"], blocks[f"{name}.weight"])
            for name, layer in module.named_modules()
            if isinstance(layer, StaticBatchNorm)
        ),
        depth=depth,
        depths=tuple(range(1, depth + 1)),
        label_axes=cut.label_axes,
        input_shape=row.shape,
        input_dtype=row.dtype,
        classes=axes[CLASSES].size,
    )


def _module(arch: Architecture, cut: Cut, settings: Mapping[str, Any] | None) -> nn.Module:
    module = call_builder(arch, cut, settings)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{arch.name} must return a torch module, not {type(module).__name__}")
    return module


def _meta_module(arch: Architecture, cut: Cut, settings: Mapping[str, Any] | None) -> nn.Module:
    try:
        with torch.device("meta"), Undrawn():
            return _module(arch, cut, settings)
    except ConfigError as error:
        if "meta tensor" not in str(error.__cause__).lower():
            raise
    cut.forget()  # the builder computes with values, such as rates that grow with the depth
    with torch.random.fork_rng(devices=[]):
        return sliceable(arch, _module(arch, cut, settings)).to("meta")


class Undrawn(TorchFunctionMode):
    """Leaves out what fills tensors without memory, and draws parameters cheaply: most of building
    a large model.
    """

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FILLS or getattr(func, "__module__", "") == nn.init.__name__:
            filled = args[0] if args else kwargs.get("tensor")
            if isinstance(filled, Tensor) and filled.is_meta:
                return filled
            if isinstance(filled, nn.Parameter):
                filled.data.copy_(noise(filled))
                return filled
        return func(*args, **kwargs)


class _WithMemory(TorchFunctionMode):
    """Refuses tensors without memory, which computing would read as whatever lies there.

    A builder may make others than parameters and buffers: attributes, or what a function of the
    model holds.
    """

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(
            isinstance(value, Tensor) and value.is_meta for value in tree_leaves((args, kwargs))
        ):
            raise ConfigError(
                "a tensor that is no parameter and no buffer needs the device that the builder had"
            )
        return func(*args, **(kwargs or {}))


def _shapes(module: nn.Module) -> Shapes:
    return {name: tuple(value.shape) for name, value in module.named_parameters()}


def _views(
    arch: Architecture,
    settings: Mapping[str, Any] | None,
    module: nn.Module,
    axes: Mapping[str, Axis],
    growth: Growth,
) -> Iterator[View]:
    """The whole model, and one of other sizes where units have many entries or lie in groups."""
    is_large = sum(value.numel() for value in module.parameters()) > _LARGE
    yield _view(_Built(arch, settings, module, axes, Cut), gradients=not is_large)
    is_flat = all(axis.groups == 1 for axis in axes.values()) and all(
        [*row.values()] == [1] for row in growth.values()
    )
    if is_flat and not is_large:
        return
    rates = (_NARROW[-1], *_NARROW) if is_large else _NARROW
    for rate, more in [
        *((rate, _more(axes, rate)) for rate in rates),
        *((rate, {}) for rate in rates),
    ]:
        with contextlib.suppress(ConfigError):
            cut = partial(Cut, rate, enlarge=more)
            sizes = {
                name: axis.kept(rate) + axis.groups * more.get(name, 0)
                for name, axis in axes.items()
            }
            other = {name: replace(axis, size=sizes[name]) for name, axis in axes.items()}
            yield _view(
                _Built(arch, settings, _meta_module(arch, cut(), settings), other, cut),
                gradients=True,
            )
            return


def _in_training(arch: Architecture, view: View) -> Iterator[View]:
    """The whole model as it trains, if it computes something else then, the same each time.

    No buffer may move.
    """
    subject = replace(view.subject, training=True)
    before = {name: value.clone() for name, value in subject.module.named_buffers()}
    with torch.random.fork_rng(devices=[]):
        try:
            first, begun = subject.run(gradients=False), _numbers(subject.module)
            again = subject.run(gradients=False)
        except Exception:  # noqa: BLE001 - the export runs it so, and says what is wrong
            return
    _refuse_moved(arch, subject, before, dict(subject.module.named_buffers()))
    moved = {
        at: value for at, value in _numbers(subject.module).items() if value != begun.get(at, value)
    }
    for steps in (
        (100, 10_000, 1_000_000) if moved and _agree(first, again) else ()
    ):  # as after so many more
        for (layer, name), value in moved.items():
            setattr(layer, name, value + type(value)((value - begun[layer, name]) * steps))
        if not _agree(again, subject.run(gradients=False)):
            raise ConfigError(
                f"{arch.name}: the number {next(iter(moved))[1]} of the model changes as it runs, and {steps} steps"
                " later it computes something else; a graph keeps what it is at first: leave that out"
            )
    if _agree(first, again) and not _agree(first, view.before):
        yield replace(
            view,
            subject=subject,
            before=subject.run(gradients=bool(view.before.gradients)),
        )


def _numbers(module: nn.Module) -> dict[tuple[nn.Module, str], float]:
    every = (
        (layer, name, value) for layer in module.modules() for name, value in vars(layer).items()
    )
    return {(layer, name): value for layer, name, value in every if type(value) in {int, float}}


def _refuse_moved(
    arch: Architecture,
    subject: Subject,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
) -> None:
    """See that running a model left its buffers as they were."""
    for name, value in after.items():
        if not torch.equal(before[name].to(value.dtype).nan_to_num(), value.nan_to_num()):
            path = name.rpartition(".")[0]
            kind = type(subject.module.get_submodule(path)).__name__
            raise ConfigError(
                f"{arch.name}: buffer {name} of module {path or '(the model itself)'} ({kind}) changes while the model"
                " runs, and graphs return parameters alone; a norm of PyTorch takes track_running_stats=False,"
                " spectral norm as a parametrization `shoal export --convert`; compute anything else from the batch"
                " each time"
            )


def _stretched(arch: Architecture, view: View, row: Row) -> Iterator[View]:
    """The same model where rare values are common: a branch for large activations, or for padding,
    treats units too.
    """
    module = view.subject.module
    whole = row.dtype == "int64"
    usual = [  # of tokens no size; the gain is enough
        (samples(module, row, _MORE_SAMPLES, scale, shift), gain)
        for scale, shift, gain in _STRETCHED
        if not whole or (scale <= 1 and not shift)
    ]
    for x, gain in (*usual, *((x, 1.0) for x in rare_samples(view.subject, row))):
        for dtype in (
            torch.float64,
            torch.float32,
        ):  # the first has no rounding to speak of; some know the other alone
            subject = stretched(view.subject, x, gain, dtype)
            with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]):
                before = subject.run(gradients=False)
                if all(bool(value.isfinite().all()) for value in before.outputs):
                    yield replace(view, subject=subject, before=before)
                break
        _refuse_moved(arch, subject, dict(module.named_buffers()), subject.buffers)


def _agree(one: Run, other: Run) -> bool:
    pairs = [*zip(one.outputs, other.outputs, strict=False)]
    return all(
        ours.shape == theirs.shape and torch.allclose(ours, theirs) for ours, theirs in pairs
    )


def _more(axes: Mapping[str, Axis], rate: float) -> dict[str, int]:
    """Units to add in each group of axes so small that a narrower model has all of them or one,
    which prove nothing.
    """
    kept = {
        name: axis.kept(rate) // axis.groups
        for name, axis in axes.items()
        if axis.kind is AxisKind.WIDTH
    }
    return {
        name: axes[name].group_size + 1 - number
        for name, number in kept.items()
        if axes[name].group_size > 1 and not 1 < number < axes[name].group_size
    }


@dataclass(frozen=True)
class _Built:
    """A model on the meta device, and how it was built."""

    arch: Architecture
    settings: Mapping[str, Any] | None
    module: nn.Module
    axes: Mapping[str, Axis]
    cut: Callable[[], Cut]


def _view(built: _Built, *, gradients: bool) -> View:
    """A model to compute with, without the cost of its initial weights where it runs without them."""
    arch = built.arch
    module = built.module
    shapes = _shapes(built.module)
    row = arch.row(built.settings)
    norms = tuple(
        f"{path}." for path, layer in module.named_modules() if isinstance(layer, StaticBatchNorm)
    )
    is_tied = len([*module.parameters()]) < len([*module.named_parameters(remove_duplicate=False)])
    if not is_tied and all(name.startswith(norms) for name, _ in module.named_buffers()):
        subject = subject_of(module, samples(module, row))
        with contextlib.suppress(Exception), _WithMemory():
            before = subject.run(gradients=gradients)
            if all(bool(value.isfinite().all()) for value in before.outputs):
                return View(subject, shapes, built.axes, before)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        real = _module(arch, built.cut(), built.settings)
    subject = subject_of(real, samples(real, row))
    try:
        return View(subject, shapes, built.axes, subject.run(gradients=gradients))
    except ConfigError as error:
        raise ConfigError(f"{arch.name}: {error}") from error
    except Exception as error:
        where = f"{at_line_of(error)} on a batch of samples of shape {list(row.shape)}"
        raise ConfigError(
            f"{arch.name}: the model fails{where}: {error!r};"
            " its forward must take one tensor [batch, *input_shape], or those that input_shape = {'name': shape, ...}"
            " names, compute in float32, and know every whole number below the rows of its smallest embedding"
        ) from error


def _head_from_labels(shapes: Shapes, dims: Mapping[str, tuple[Dim, ...]]) -> dict[str, str]:
    """Without a depth unit: the head starts at the first parameter that has a row for each label."""
    blocks: dict[str, str] = {}
    current = STEM
    for name in shapes:
        if any(dim.axis == CLASSES for dim in dims[name]):
            current = HEAD
        blocks[name] = current
    return blocks


def _blocks_by_depth(
    arch: Architecture, settings: Mapping[str, Any] | None, shapes: Shapes, depth: int
) -> dict[str, str]:
    """With a depth unit: a parameter belongs to the first depth that has it."""
    first: dict[str, int] = {}
    for number in range(depth + 1):
        found = _shapes(_meta_module(arch, Cut(depth=number), settings))
        odd = [name for name, shape in found.items() if shapes.get(name) != shape]
        if odd or not first.keys() <= found.keys():
            name = odd[0] if odd else min(first.keys() - found.keys())
            raise ConfigError(
                f"{arch.name}: parameter {name} of depth {number} is not the same in a deeper model;"
                " blocks must be alike and be added on top"
            )
        for name in found:
            first.setdefault(name, number)
    in_blocks = [position for position, name in enumerate(shapes) if first[name] > 0]
    if len({first[name] for name in shapes} - {0}) != depth:
        raise ConfigError(
            f"{arch.name}: asked for a depth of {depth}, but not every block has parameters"
        )
    return {
        name: block_name(first[name])
        if first[name]
        else (STEM if position < in_blocks[0] else HEAD)
        for position, name in enumerate(shapes)
    }
