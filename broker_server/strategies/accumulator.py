"""Folds updates of different sub-models into running sums, one update at a time.

The selective average (specification, shared notation; HeteroFL, Diao et al., ICLR 2021, section 3):
for every scalar e of every global tensor, with N(e) the devices whose sub-model holds e and, on
rows of a label axis, whose data has the row's label,

    theta_new(e) = sum_{k in N(e)} w_k theta_k(e) / sum_{k in N(e)} w_k     if N(e) is not empty
    theta_new(e) = theta_old(e)                                             otherwise

An accumulator keeps one float32 sum for each parameter and, for each plan in use, the total weight
of the updates cut by it (in all, and for each label). The divisors follow from these totals when
the round closes, parameter by parameter and only along dimensions that some plan cuts: all
positions of a convolution kernel share one divisor. Memory is therefore the size of the model,
whatever the number of updates.

Addition of floating-point numbers is not associative. The caller therefore folds in an order that
does not depend on when updates arrive, and gets the same bits each time.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker_server.strategies.coverage import PlanTotals, coverage_of
from broker_server.strategies.division import divide
from broker_server.strategies.optimizer_rules import OptimizerSettings
from broker_server.strategies.stage import Stage, stated
from broker_server.strategies.strategy import Contribution, Merge, average_and_step
from broker_server.strategies.traits import Trait
from fleet_protocol.errors import PlanError
from models.layout import Layout
from models.slicing import CompiledPlan, CompiledTensor, Region, Tensors, tensor_regions

# The weights and rows of `fold`.
STAGES = stated(
    Stage(
        name='strategy.weighting = "samples"',
        remedy='set strategy.weighting = "uniform"',
        setting="strategy.weighting",
        wanted=lambda run: run.strategy.weighting == "samples",
        breaks=frozenset({Trait.ALIKE}),
    ),
    Stage(
        name="strategy.label_rule = true",
        remedy="set strategy.label_rule = false",
        setting="strategy.label_rule",
        wanted=lambda run: run.strategy.label_rule is True,
        breaks=frozenset({Trait.LABELS_HIDDEN}),
    ),
)

# 1 MB of products at a time: they are added while they are in the second-level cache.
_SCRATCH_VALUES = 256 * 1024

Floats = NDArray[np.float32]
Factor = Callable[[CompiledPlan, str], float]
"""The factor of an update's weight for one of its tensors, from the plan and the tensor's name."""


def _no_factor(_plan: CompiledPlan, _name: str) -> float:
    return 1.0


@dataclass
class Accumulator:
    """The running state of one merge.

    Attributes:
        sums: the weighted sum of the updates, float32, of the global shape, by parameter.
        totals: the total weight of the updates cut by the plan, by plan key.
        updates: number of folded updates.
        spent: whether it was finished; its sums then belong to the result.
    """

    layout: Layout
    sums: dict[str, Floats]
    totals: dict[str, PlanTotals] = field(default_factory=dict)
    updates: int = 0
    factor: Factor = field(default=_no_factor)
    spent: bool = False
    scratch: Floats = field(
        default_factory=lambda: np.empty(_SCRATCH_VALUES, np.float32), repr=False
    )


def start(layout: Layout, factor: Factor = _no_factor) -> Accumulator:
    """Return an empty accumulator."""
    sums = {}
    for parameter in layout.parameters:
        sums[parameter.name] = np.zeros(parameter.shape, np.float32)
    return Accumulator(layout, sums, factor=factor)


def fold(  # noqa: PLR0913  (options by keyword)
    state: Accumulator,
    key: str,
    plan: CompiledPlan,
    update: Tensors,
    *,
    weight: float = 1.0,
    labels: Iterable[int] | None = None,
) -> None:
    """Add one update to the sums.

    Args:
        state: changed in place.
        key: name of the plan; updates with the same key were cut by the same plan.
        plan: the entries that the update contains.
        update: the sub-model's parameters by name, float32; they may be views of a mapped file.
        weight: w_k above, > 0.
        labels: labels in the device's data (C_k); None counts every row.

    Raises:
        PlanError: the update does not fit the plan, or the accumulator is spent; nothing was
            added.
    """
    if state.spent:
        raise PlanError("this accumulator was finished; start another for the next merge")
    if not weight > 0:
        raise PlanError(f"an update's weight must be positive, not {weight}")
    _check_update(plan, update)
    # In one form, because the regions of equal rows are cached.
    rows = None if labels is None else tuple(sorted(set(labels)))
    label_axes = state.layout.labelled
    # Sums may overflow: the caller checks that the result is finite.
    with np.errstate(over="ignore", invalid="ignore"):
        for name, tensor in plan.tensors.items():
            # Updates contain no statistics.
            if name not in plan.required:
                continue
            tensor_weight = weight * state.factor(plan, name)
            for region in _folded_regions(label_axes, tensor, rows):
                _add_region(
                    state.sums[name],
                    region,
                    update[name],
                    tensor_weight,
                    state.scratch,
                )
    count(
        state,
        key,
        plan,
        weight,
        None if rows is None else np.array(rows, np.int64),
    )


def count(
    state: Accumulator,
    key: str,
    plan: CompiledPlan,
    weight: float = 1.0,
    rows: NDArray[np.int64] | None = None,
) -> None:
    """Add the weight of an update to the totals of its plan, from which the divisors are computed.

    Args:
        state: changed in place.
        key: name of the plan.
        plan: the entries that the update contains.
        weight: w_k above.
        rows: the labels whose rows the update contains; None for all.
    """
    totals = state.totals.get(key)
    if totals is None:
        most_labels = state.layout.classes
        for axis in state.layout.label_axes:
            most_labels = max(most_labels, state.layout.axes[axis].size)
        totals = state.totals[key] = PlanTotals(plan, 0.0, np.zeros(most_labels))
    totals.weight += weight
    totals.by_label[slice(None) if rows is None else rows] += weight
    state.updates += 1


def coverage(state: Accumulator, name: str) -> Floats:
    """Return the total weight behind every entry of a parameter.

    Returns:
        A float32 array that broadcasts to the parameter; dimensions that no plan cuts have
        length 1.
    """
    return coverage_of(
        state.layout,
        name,
        list(state.totals.values()),
        state.factor,
    )


def finish(state: Accumulator, old: Tensors) -> dict[str, NDArray[np.float32]]:
    """Divide the sums by their weights, which makes them the new global weights.

    Entries that no update covers keep their bits.

    Raises:
        PlanError: the accumulator is spent already.
    """
    if state.spent:
        raise PlanError("this accumulator was finished already")
    state.spent = True
    for name, total in state.sums.items():
        divide(total, coverage(state, name), old[name])
    return state.sums


def selective_average(
    layout: Layout,
    optimizer: OptimizerSettings | None,
    *,
    by_samples: bool,
    label_rule: bool,
) -> Merge[Accumulator]:
    """Return the merge by the selective average.

    Args:
        layout: the global model.
        optimizer: the server's optimizer, if any.
        by_samples: whether w_k is the device's number of samples; otherwise it is 1.
        label_rule: whether the rows of labels count only from devices that hold the label.
    """

    def add(sums: Accumulator, update: Contribution) -> None:
        fold(
            sums,
            update.key,
            update.plan,
            update.weights,
            weight=float(update.metrics.weight) if by_samples else 1.0,
            labels=update.metrics.labels if label_rule else None,
        )

    return Merge(
        start=lambda: start(layout),
        fold=add,
        finish=average_and_step(finish, optimizer),
        deltas=True,
    )


def _check_update(plan: CompiledPlan, update: Tensors) -> None:
    for name in plan.required:
        value = update.get(name)
        shape = plan.tensors[name].local_shape
        if value is None or value.shape != shape or value.dtype != np.float32:
            actual = "missing" if value is None else f"{value.dtype} {value.shape}"
            raise PlanError(
                f"{plan.title}: tensor {name} of an update should be float32 {shape} but is"
                f" {actual}"
            )


def _folded_regions(
    label_axes: frozenset[str],
    tensor: CompiledTensor,
    rows: tuple[int, ...] | None,
) -> tuple[Region, ...]:
    """Return the regions of a tensor that an update adds to, with the label rule if rows count."""
    has_label_axis = any(dim.axis in label_axes for dim in tensor.dims)
    if rows is None or not has_label_axis:
        return tensor.regions
    return _labelled_regions(tensor, label_axes, rows)


# Many devices have the same labels, so the same regions are requested repeatedly.
@lru_cache(maxsize=256)
def _labelled_regions(
    tensor: CompiledTensor,
    axes: frozenset[str],
    rows: tuple[int, ...],
) -> tuple[Region, ...]:
    return tensor_regions(tensor, dict.fromkeys(axes, np.array(rows, np.int64)))


def _add_region(
    total: Floats,
    region: Region,
    update: NDArray[Any],
    weight: float,
    scratch: Floats,
) -> None:
    values = update[region.part]
    # Scattered units: numpy copies them, so there is no view to add into.
    if not all(isinstance(index, slice) for index in region.whole):
        total[region.whole] += values if weight == 1.0 else values * np.float32(weight)
        return
    view = total[region.whole]
    if weight == 1.0:
        np.add(view, values, out=view)
        return
    for place in _blocks(values.shape, scratch.size):
        block = values[place]
        product = scratch[: block.size].reshape(block.shape)
        np.multiply(block, np.float32(weight), out=product)
        np.add(view[place], product, out=view[place])


def _blocks(shape: tuple[int, ...], most_values: int) -> Iterator[tuple[Any, ...]]:
    """Cut an array into blocks of at most ``most_values`` entries, of whole rows where they fit."""
    if not shape:
        yield ()
        return
    row_values = int(np.prod(shape[1:], dtype=np.int64))
    if row_values > most_values:
        # A single row is too long: cut every row by itself.
        for row in range(shape[0]):
            for place in _blocks(shape[1:], most_values):
                yield (row, *place)
        return
    step = max(1, most_values // max(1, row_values))
    for first in range(0, shape[0], step):
        yield (slice(first, first + step),)
