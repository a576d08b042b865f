"""Infers the layout of a model: the assignment of parameter entries to units of axes.

A user writes a plain torch module and takes sizes from its `Cut`. The inference has three steps,
which do not inspect the code of the model:

1. *Growth* (`models.zoo.growth`). The model is built once for each axis with the axis larger. Its
   shapes show which dimensions grow with the axis, and by how many entries per unit. These builds
   use torch's meta device and need no memory.
2. *Orders* (`models.zoo.entry_order`, `models.zoo.reading_order`). Shapes do not show where in a
   dimension the entries of a unit are. The inference tries in turn: the entries of each unit side
   by side, another order that is the same everywhere, and the order that the gradients of the model
   show.
3. *Proof* (`models.zoo.proof`). Permuting the units of a model in all its parameters gives the same
   model. So an order is right if permuting the units by it does not change the outputs, and
   permutes the gradients of a training step like the parameters. A wrong order mixes entries of
   several units, which changes both, because the random parameters of all units differ.

The proof concerns the computed numbers. So it is repeated on variants of the model: a narrower one,
because some orders are equal in the whole model (`models.zoo.variants`), the model in training
(`models.zoo.training_variant`), and rare values (`models.zoo.rare_values`). If no order is right,
`models.zoo.explanation` gives the reason. Decision records 2 and 26 give the reasons.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from fleet_protocol.errors import ConfigError, ModelError, PlanError, ShoalError
from models.architecture import Architecture
from models.axes import Axis
from models.block_names import HEAD, STEM, block_name
from models.cut import CLASSES, Cut
from models.dims import Dim
from models.layout import Layout
from models.parameters import Parameter, Statistic
from models.user_lines import at_line_of, first_line
from models.zoo.builds import ModelBuilder, shapes_of
from models.zoo.entry_order import with_fixed_axes
from models.zoo.explanation import explain
from models.zoo.growth import Growth, Shapes, measure_growth
from models.zoo.layers import StaticBatchNorm
from models.zoo.lora_scaling import changed_scaling, scalings_of
from models.zoo.proof import (
    Proof,
    ProofTask,
    Refutation,
    Variant,
    in_double_precision,
    movable_axes,
    prove_layout,
    prove_usual_orders,
    search_orders,
)
from models.zoo.rare_values import variants_with_rare_values
from models.zoo.remedies import Trials
from models.zoo.sliceable import check_sliceable
from models.zoo.training_variant import variant_in_training
from models.zoo.variants import variants_of_size

_OUTPUTS_HINT = (
    "; the model does not use cut.classes(n): if these are its outputs, build them with it"
)
_PIXELS = 3  # dimensions of an output for each pixel of a sample: numbers, height, width

ParameterDims = Mapping[str, tuple[Dim, ...]]
"""The dimensions of each parameter."""


class RefutedAxisError(ModelError):
    """An axis has no right layout; says so without a reason.

    Attributes:
        axis: name of the axis.
        problem: what is wrong, without the name of the model.
    """

    def __init__(self, arch: str, axis: str) -> None:
        """Say which axis of which model it is."""
        self.axis = axis
        self.problem = (
            f"units of axis {axis} are not interchangeable, or lie in no order that can be read"
        )
        super().__init__(f"{arch}: {self.problem}")


def infer_layout(arch: Architecture, settings: Mapping[str, Any] | None = None) -> Layout:
    """Infer the layout of an architecture's global model; see `models.registry.infer_layout`."""
    builder = ModelBuilder(arch, settings)
    return _infer(builder, explains=True)


def judge_layout(builder: ModelBuilder, *, screens: bool = False) -> Layout:
    """Infer a layout as `infer_layout` does, with a short refusal that looks for no remedies.

    Args:
        builder: builds the model; the layout counts as refused when its time is over.
        screens: whether to leave out what rarely refutes a layout: training, and rare values. Such
            a layout is a candidate, and not proved.
    """
    return _infer(builder, explains=False, screens=screens)


def _is_accepted(builder: ModelBuilder) -> bool:
    """Return whether a layout of an architecture exists."""
    try:
        _infer(builder, explains=False)
    except (ConfigError, PlanError):
        return False
    return True


def _infer(builder: ModelBuilder, *, explains: bool, screens: bool = False) -> Layout:
    """Infer a layout; a refusal explains what is wrong, and tries remedies, if asked to."""
    arch = builder.arch
    cut = Cut()
    # On the meta device: nothing is computed until the proof.
    module = check_sliceable(arch, builder.build_on_meta(cut))
    _check_scalings(builder, module)
    shapes = shapes_of(module)
    # Recorded before the model runs, which may change it.
    frozen = _frozen_names(module)
    axes = dict(cut.axes)
    blocks = None if cut.blocks is None else blocks_by_depth(builder, shapes, cut.blocks)
    growth = measure_growth(
        arch.name, axes, shapes, lambda enlarge: builder.shapes(Cut(enlarge=enlarge))
    )
    task = _proof_task(builder, module, axes, growth, screens=screens)
    # Without labels, the outputs of the model count as its classes.
    classes = axes[CLASSES].size if CLASSES in axes else _count_numbers(arch, task)
    task, layout = _prove_or_refuse(arch.name, task)
    if isinstance(layout, Refutation):
        if not explains:
            raise RefutedAxisError(arch.name, layout.axis)
        hint = "" if CLASSES in axes else _OUTPUTS_HINT
        trials = Trials(builder, _is_accepted)
        raise ModelError(f"{arch.name}: {explain(layout, task, trials)}{hint}")
    # Only now, because the head is found by the axes of labels.
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


def _prove_or_refuse(arch: str, task: ProofTask) -> tuple[ProofTask, Proof | Refutation]:
    """Prove a layout as `_prove` does.

    Raises:
        ModelError: if the model, which ran before, fails during the proof.
    """
    try:
        return _prove(task)
    except ShoalError:
        raise
    except Exception as error:
        raise ModelError(
            f"{arch}: the model ran, but fails{at_line_of(error)} when it runs again with other"
            f" values or in another precision: {first_line(error)}; a run must not leave anything"
            " behind in the model, so register all tensors of a module as its own parameters or"
            " buffers, or use another kind of layer or adapter"
        ) from error


def _prove(task: ProofTask) -> tuple[ProofTask, Proof | Refutation]:
    """Prove a layout, in double precision if single precision does not suffice.

    Returns:
        The task whose precision decided, and its outcome.
    """
    # Single precision is cheaper, and a proof in it is enough.
    usual = prove_usual_orders(task)
    if usual is not None:
        return task, usual
    # The sums of a permuted model are rounded differently. One number near the edge of a ReLU can
    # then change many others, also in a model whose precision is good enough otherwise.
    exact = in_double_precision(task)
    if exact is None:
        return task, search_orders(task)
    return exact, prove_layout(exact)


def _check_scalings(builder: ModelBuilder, module: nn.Module) -> None:
    """Refuse adapters of other packages that count for more in a narrow sub-model."""
    changed = changed_scaling(builder.build, scalings_of(module))
    if changed:
        raise ModelError(
            f"{builder.arch.name}: the scaling of the adapter of {changed} follows from the rank of"
            " the sub-model, so its units would count for more in a narrow one and could not be"
            " merged; export with --convert, which keeps the scaling of the whole adapter, or give"
            " the adapter a lora_alpha that is a fixed multiple of the rank that the cut returns"
        )


def _count_numbers(arch: Architecture, task: ProofTask) -> int:
    """Return the number of outputs of a model without labels for each place of a sample.

    Raises:
        ConfigError: the model has several outputs, or a width cuts them.
    """
    # A narrower variant would have fewer outputs if a width cut them.
    counts: set[int] = set()
    for variant in task.variants:
        outputs = variant.before.outputs
        if len(outputs) != 1:
            raise ModelError(
                f"{arch.name} has {len(outputs)} outputs but does not use cut.classes(n): build"
                " the last layer of one output with it, as in nn.Linear(hidden,"
                " cut.classes(classes))"
            )
        shape = outputs[0].shape[1:]
        # As graphs read them: with pixels the numbers of a place come first.
        place = 0 if len(shape) >= _PIXELS else -1
        counts.add(shape[place] if shape else 1)
    if len(counts) > 1:
        raise ModelError(
            f"{arch.name} does not use cut.classes(n), and its width cuts its outputs: build the"
            " last layer with the same number of outputs at every width, for labels with"
            " cut.classes(n)"
        )
    return counts.pop()


def _frozen_names(module: nn.Module) -> set[str]:
    frozen: set[str] = set()
    for name, value in module.named_parameters():
        if not value.requires_grad:
            frozen.add(name)
    return frozen


def _proof_task(
    builder: ModelBuilder,
    module: nn.Module,
    axes: Mapping[str, Axis],
    growth: Growth,
    *,
    screens: bool,
) -> ProofTask:
    """Collect the variants of a model to prove its layout on."""
    sized = variants_of_size(builder, module, axes, growth)
    variants = sized.proving()
    if screens:
        return ProofTask(variants, growth)
    further: list[Variant] = []
    # A model's behaviour in training does not depend on the size of its pictures.
    training = variant_in_training(builder.arch, sized.small)
    if training is not None:
        further.append(training)
    smallest = variants[-1]  # the cheapest to run once more for each rare value
    row = builder.row
    if not row.named:
        row = row.with_shape(tuple(smallest.model.samples.shape[1:]))
    moves = bool(movable_axes(axes))
    further += variants_with_rare_values(builder.arch, smallest, row, moves=moves)
    return ProofTask((*variants, *further), growth, (sized.small, *variants[1:]))


def _statistics(
    module: nn.Module, dims: ParameterDims, blocks: Mapping[str, str]
) -> tuple[Statistic, ...]:
    """Return the statistics of static batch norms, which have the order of their weights."""
    statistics: list[Statistic] = []
    for path, layer in module.named_modules():
        if isinstance(layer, StaticBatchNorm):
            weight = f"{path}.weight"
            statistics.append(Statistic(path, dims[weight], blocks[weight]))
    return tuple(statistics)


def _blocks_by_labels(shapes: Shapes, dims: ParameterDims) -> dict[str, str]:
    """Name the block of each parameter of a model that has no depth.

    The head starts at the first parameter that has a row for each label; without one, it is the
    last layer.
    """
    blocks: dict[str, str] = {}
    current = STEM
    has_labels = any(dim.axis == CLASSES for name in shapes for dim in dims[name])
    # A parameter's name ends with its layer's attribute.
    last_layer = [*shapes][-1].rpartition(".")[0] if shapes else ""
    for name in shapes:
        if any(dim.axis == CLASSES for dim in dims[name]):
            current = HEAD
        if not has_labels and name.rpartition(".")[0] == last_layer:
            current = HEAD
        blocks[name] = current
    return blocks


def blocks_by_depth(builder: ModelBuilder, shapes: Shapes, depth: int) -> dict[str, str]:
    """Name the block of each parameter of a model that has a depth.

    A parameter belongs to the smallest depth that has it. Parameters of depth 0 are the stem if
    they come before all blocks, and the head otherwise.
    """
    title = builder.arch.name
    first_depth: dict[str, int] = {}
    for number in range(depth + 1):
        cut = Cut(depth=number)
        # Depth 0 shows which parameters belong to no block.
        shallower = builder.shapes(cut) if number else _shapes_without_blocks(builder, depth)
        changed = _first_changed(shallower, shapes, first_depth)
        if changed is not None:
            raise ModelError(
                f"{title}: parameter {changed} of depth {number} differs in a deeper model; all"
                " blocks must be equal and be added on top"
            )
        for name in shallower:
            first_depth.setdefault(name, number)
    # A block without parameters has no depth of its parameters that would show it.
    if len({first_depth[name] for name in shapes} - {0}) != depth:
        raise ModelError(
            f"{title}: requested a depth of {depth}, but some blocks have no parameters"
        )
    blocks: dict[str, str] = {}
    outside = STEM
    for name in shapes:
        if first_depth[name]:
            # Parameters outside blocks after the first block are the head.
            outside = HEAD
            blocks[name] = block_name(first_depth[name])
        else:
            blocks[name] = outside
    return blocks


def _shapes_without_blocks(builder: ModelBuilder, depth: int) -> Shapes:
    """Return the shapes of a model without its blocks, which some builders do not build.

    Then the parameters of the first block are those that the second one has with the next number.

    Raises:
        ConfigError: if the builder fails, and the model has one block only.
    """
    try:
        return builder.shapes(Cut(depth=0))
    except ConfigError:
        # With one block there is no second one to compare with.
        if depth == 1:
            raise
    first = builder.shapes(Cut(depth=1))
    second = builder.shapes(Cut(depth=2))
    of_first_block: set[str] = set()
    for name in second.keys() - first.keys():
        of_first_block.update(_names_one_below(name))
    return {name: shape for name, shape in first.items() if name not in of_first_block}


def _names_one_below(name: str) -> list[str]:
    """List a parameter's name with one of its numbers smaller by 1, for each number."""
    modules = name.split(".")
    names: list[str] = []
    for place, module in enumerate(modules):
        if module.isdecimal() and int(module):
            names.append(".".join([*modules[:place], str(int(module) - 1), *modules[place + 1 :]]))
    return names


def _first_changed(shallower: Shapes, whole: Shapes, previous: Mapping[str, int]) -> str | None:
    """Return a parameter that differs from the whole model, or is missing in a deeper one."""
    for name, shape in shallower.items():
        if whole.get(name) != shape:
            return name
    missing = previous.keys() - shallower.keys()
    return min(missing) if missing else None
