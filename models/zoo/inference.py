"""Infer the layout of a model: which entries of its parameters belong to which unit of which axis.

A user writes a plain torch module and only asks its `Cut` for sizes. The layout follows in three
steps, none of which looks at the code of the model:

1. *Growth* (`models.zoo.growth`). The model is built once for each axis with the axis larger. Its
   shapes tell which dimensions the axis moves, and by how many entries for each unit. These builds
   are on torch's meta device and cost no memory.
2. *Orders* (`models.zoo.entry_order`, `models.zoo.reading_order`). Shapes do not tell where in a
   dimension the entries of a unit lie. Tried are, one after the other: the entries of each unit
   side by side, the same other order everywhere, and what the gradients of the model show.
3. *Proof* (`models.zoo.proof`). A model whose units changed places in all its parameters is the
   same model. So an order holds if permuting the units as it says leaves the outputs, and moves the
   gradients of a training step as it moved the parameters. A wrong order mixes entries of several
   units, which changes both, as no two units of the random parameters are alike.

The proof is about the numbers that were computed. So it is repeated on variants of the model: a
narrower one, as some orders are alike in the whole (`models.zoo.variants`), the model in training
(`models.zoo.training_variant`), and on values that few samples have (`models.zoo.rare_values`).
Where no order holds, `models.zoo.explanation` says why. Decision records 2 and 26 give the reasons.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from fleet_protocol.errors import ConfigError, PlanError
from models.architecture import Architecture
from models.axes import Axis
from models.cut import CLASSES, Cut
from models.dims import Dim
from models.layout import HEAD, STEM, Layout, Parameter, Statistic, block_name
from models.zoo.builds import ModelBuilder, shapes_of
from models.zoo.entry_order import with_fixed_axes
from models.zoo.explanation import explain
from models.zoo.growth import Growth, Shapes, measure_growth
from models.zoo.layers import StaticBatchNorm
from models.zoo.proof import ProofTask, Refutation, prove_layout
from models.zoo.rare_values import variants_with_rare_values
from models.zoo.sliceable import check_sliceable
from models.zoo.training_variant import variant_in_training
from models.zoo.variants import variants_of_size

_OUTPUTS_HINT = (
    "; the model never asked for cut.classes(n): if these are its outputs, make them with it"
)
_PIXELS = 3  # dimensions of an output for each pixel of a sample: numbers, height, width

ParameterDims = Mapping[str, tuple[Dim, ...]]
"""The dimensions of each parameter."""


def infer_layout(arch: Architecture, settings: Mapping[str, Any] | None = None) -> Layout:
    """Infer the layout of an architecture's global model; see `models.registry.infer_layout`."""
    builder = ModelBuilder(arch, settings)
    return _infer(builder, lambda axis: _is_accepted(builder, axis))


def _is_accepted(builder: ModelBuilder, axis: Axis) -> bool:
    """Return whether a layout is found with another form of an axis, as its author would ask."""

    def build(cut: Cut, **chosen: Any) -> Any:
        cut.declare(axis)
        return builder.arch.build(cut, **chosen)

    changed = replace(builder, arch=replace(builder.arch, build=build))
    try:
        _infer(changed, lambda _: False)
    except (ConfigError, PlanError):
        return False
    return True


def _infer(builder: ModelBuilder, is_accepted: Callable[[Axis], bool]) -> Layout:
    """Infer a layout; whether other forms of an axis are accepted is for the explanation alone."""
    arch = builder.arch
    cut = Cut()
    module = check_sliceable(arch, builder.build_on_meta(cut))
    shapes = shapes_of(module)
    # Noted before the model runs, which may change it.
    frozen = _frozen_names(module)
    axes = dict(cut.axes)
    blocks = None if cut.blocks is None else _blocks_by_depth(builder, shapes, cut.blocks)
    growth = measure_growth(arch.name, axes, lambda enlarge: builder.shapes(Cut(enlarge=enlarge)))
    task = _proof_task(builder, module, axes, growth)
    classes = axes[CLASSES].size if CLASSES in axes else _count_numbers(arch, task)
    layout = prove_layout(task)
    if isinstance(layout, Refutation):
        hint = "" if CLASSES in axes else _OUTPUTS_HINT
        raise ConfigError(f"{arch.name}: {explain(layout, task, is_accepted)}{hint}")
    if blocks is None:
        blocks = _blocks_by_labels(shapes, layout.dims)
    parameters: list[Parameter] = []
    base: list[Parameter] = []
    for name, shape in shapes.items():
        tensors = base if name in frozen else parameters
        tensors.append(Parameter(name, shape, layout.dims[name], blocks[name]))
    depth = 1 if cut.blocks is None else cut.blocks
    all_axes = with_fixed_axes(axes, layout.dims)
    return Layout(
        arch=arch.name,
        settings=arch.settings(builder.settings),
        axes=all_axes,
        parameters=tuple(parameters),
        base=tuple(base),
        statistics=_statistics(module, layout.dims, blocks),
        depth=depth,
        depths=tuple(range(1, depth + 1)),
        label_axes=cut.label_axes,
        input_shape=builder.row.shape,
        input_dtype=builder.row.dtype,
        classes=classes,
    )


def _count_numbers(arch: Architecture, task: ProofTask) -> int:
    """Return how many numbers a model without labels computes for each place of a sample.

    Raises:
        ConfigError: it has several outputs, or a width cuts them.
    """
    counts: set[int] = set()
    for variant in task.variants:
        outputs = variant.before.outputs
        if len(outputs) != 1:
            raise ConfigError(
                f"{arch.name} has {len(outputs)} outputs and never asked for cut.classes(n): make "
                "the last layer of one with it, as in nn.Linear(hidden, cut.classes(classes))"
            )
        shape = outputs[0].shape[1:]
        # As graphs read them: with pixels the numbers of a place come first.
        place = 0 if len(shape) >= _PIXELS else -1
        counts.add(shape[place] if shape else 1)
    if len(counts) > 1:
        raise ConfigError(
            f"{arch.name} never asked for cut.classes(n), and its width cuts its outputs: make the "
            "last layer with as many outputs at every width, for labels by cut.classes(n)"
        )
    return counts.pop()


def _frozen_names(module: nn.Module) -> set[str]:
    frozen: set[str] = set()
    for name, value in module.named_parameters():
        if not value.requires_grad:
            frozen.add(name)
    return frozen


def _proof_task(
    builder: ModelBuilder, module: nn.Module, axes: Mapping[str, Axis], growth: Growth
) -> ProofTask:
    """Collect the variants of a model to prove its layout on."""
    variants = list(variants_of_size(builder, module, axes, growth))
    smallest = variants[-1]  # the cheapest to run once more for each rare value
    training = variant_in_training(builder.arch, variants[0])
    if training is not None:
        variants.append(training)
    variants += variants_with_rare_values(builder.arch, smallest, builder.row)
    return ProofTask(tuple(variants), growth)


def _statistics(
    module: nn.Module, dims: ParameterDims, blocks: Mapping[str, str]
) -> tuple[Statistic, ...]:
    """List the statistics of static batch norms, which lie as the weights of their layers do."""
    statistics: list[Statistic] = []
    for path, layer in module.named_modules():
        if isinstance(layer, StaticBatchNorm):
            weight = f"{path}.weight"
            statistics.append(Statistic(path, dims[weight], blocks[weight]))
    return tuple(statistics)


def _blocks_by_labels(shapes: Shapes, dims: ParameterDims) -> dict[str, str]:
    """Name the block of each parameter of a model that has no depth.

    The head starts at the first parameter that has a row for each label; where there are none, it
    is the last layer.
    """
    blocks: dict[str, str] = {}
    current = STEM
    has_labels = any(dim.axis == CLASSES for name in shapes for dim in dims[name])
    last_layer = [*shapes][-1].rpartition(".")[0] if shapes else ""
    for name in shapes:
        if any(dim.axis == CLASSES for dim in dims[name]):
            current = HEAD
        if not has_labels and name.rpartition(".")[0] == last_layer:
            current = HEAD
        blocks[name] = current
    return blocks


def _blocks_by_depth(builder: ModelBuilder, shapes: Shapes, depth: int) -> dict[str, str]:
    """Name the block of each parameter of a model that has a depth.

    A parameter belongs to the first depth that has it. Those of depth 0 are the stem before all
    blocks, and the head behind the first of them.
    """
    title = builder.arch.name
    first_depth: dict[str, int] = {}
    for number in range(depth + 1):
        shallower = builder.shapes(Cut(depth=number))
        changed = _first_changed(shallower, shapes, first_depth)
        if changed is not None:
            raise ConfigError(
                f"{title}: parameter {changed} of depth {number} is not the same in a deeper model;"
                " blocks must be alike and be added on top"
            )
        for name in shallower:
            first_depth.setdefault(name, number)
    if len({first_depth[name] for name in shapes} - {0}) != depth:
        raise ConfigError(
            f"{title}: asked for a depth of {depth}, but not every block has parameters"
        )
    blocks: dict[str, str] = {}
    outside = STEM
    for name in shapes:
        if first_depth[name]:
            outside = HEAD
            blocks[name] = block_name(first_depth[name])
        else:
            blocks[name] = outside
    return blocks


def _first_changed(shallower: Shapes, whole: Shapes, previous: Mapping[str, int]) -> str | None:
    """Return a parameter that differs from the whole model, or that an even shallower one had."""
    for name, shape in shallower.items():
        if whole.get(name) != shape:
            return name
    missing = previous.keys() - shallower.keys()
    return min(missing) if missing else None
