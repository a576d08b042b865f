"""Streaming accumulators: updates of different sub-models are folded into running sums one at a
time.

The selective average (specification, shared notation; HeteroFL, Diao et al., ICLR 2021, section 3):
for every scalar e of every global tensor, with N(e) the devices whose sub-model holds e and, on
rows of a label axis, whose data has the row's label,

    theta_new(e) = sum_{k in N(e)} w_k theta_k(e) / sum_{k in N(e)} w_k     if N(e) is not empty
    theta_new(e) = theta_old(e)                                             otherwise

Kept in memory are one float32 sum per parameter and, for each plan in use, the total weight of the
updates cut by it (and one total per label). What an entry must be divided by is worked out from
these when the round closes, parameter by parameter and only along dimensions that some plan cuts:
all positions of a convolution kernel share one count. Memory is therefore the size of the model,
whatever the number of updates.

Floating point addition does not associate, so the caller folds in an order of its own (`folding`
takes the devices' names) and gets the same bits however the updates arrived.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import PlanError
from models.layout import Layout
from models.slicing import (
    CompiledPlan,
    CompiledTensor,
    Region,
    Run,
    Tensors,
    tensor_regions,
)

_SCRATCH_VALUES = (
    256 * 1024
)  # 1 MB of products: they are added while they are still in the second-level cache

Floats = NDArray[np.float32]
Factor = Callable[[CompiledPlan, str], float]
"""Of the weight of an update, for one of its tensors: by plan and name."""


def _alike(_plan: CompiledPlan, _name: str) -> float:
    return 1.0


@dataclass
class _Group:
    """The updates that were cut by one plan: their total weight, and for each label that of those
    that hold it.
    """

    plan: CompiledPlan
    weight: float
    by_label: NDArray[np.float64]


@dataclass
class Accumulator:
    """The running state of one merge."""

    layout: Layout
    sums: dict[str, Floats]  # weighted sums, float32, of the global shapes
    groups: dict[str, _Group] = field(default_factory=dict)  # totals by plan key
    updates: int = 0  # how many were folded
    factor: Factor = field(default=_alike)
    spent: bool = False  # it was finished; its sums belong to the result
    scratch: Floats = field(
        default_factory=lambda: np.empty(_SCRATCH_VALUES, np.float32), repr=False
    )


def start(layout: Layout, factor: Factor = _alike) -> Accumulator:
    """An empty accumulator."""
    sums = {item.name: np.zeros(item.shape, np.float32) for item in layout.parameters}
    return Accumulator(layout, sums, factor=factor)


def _check(plan: CompiledPlan, update: Tensors) -> None:
    for name in plan.required:
        value = update.get(name)
        shape = plan.tensors[name].local_shape
        if value is None or value.shape != shape or value.dtype != np.float32:
            found = "missing" if value is None else f"{value.dtype} {value.shape}"
            raise PlanError(
                f"{plan.title}: tensor {name} of an update should be float32 {shape} but is {found}"
            )


def fold(
    state: Accumulator,
    key: str,
    plan: CompiledPlan,
    update: Tensors,
    *,
    weight: float = 1.0,
    labels: Iterable[int] | None = None,
) -> None:
    """Add one update.

    Args:
        state: changed in place.
        key: name of the plan; updates with the same key were cut by the same plan.
        plan: what the update holds.
        update: the sub-model's parameters by name, float32; they may be views of a mapped file.
        weight: w_k above, > 0.
        labels: labels in the device's data (C_k); None takes every row.

    Raises:
        PlanError: the update is not one of this plan, or the accumulator is spent; nothing was
            added.
    """
    if state.spent:
        raise PlanError("this accumulator was finished; start another for the next merge")
    if not weight > 0:
        raise PlanError(f"an update's weight must be positive, not {weight}")
    _check(plan, update)
    axes = state.layout.labelled
    rows = None if labels is None else tuple(sorted(set(labels)))
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # whoever takes the result checks that it is finite
        for name, tensor in plan.tensors.items():
            if name not in plan.required:
                continue
            boxes: tuple[Region, ...] = tensor.regions
            if rows is not None and any(dim.axis in axes for dim in tensor.dims):
                boxes = _boxes(tensor, axes, rows)
            own = weight * state.factor(plan, name)
            for box in boxes:
                _add(state.sums[name], box, update[name], own, state.scratch)
    count(state, key, plan, weight, None if rows is None else np.array(rows, np.int64))


@lru_cache(maxsize=256)
def _boxes(
    tensor: CompiledTensor, axes: frozenset[str], rows: tuple[int, ...]
) -> tuple[Region, ...]:
    """What an update adds to where a label rule applies: many devices have the same labels."""
    return tensor_regions(tensor, dict.fromkeys(axes, np.array(rows, np.int64)))


def count(
    state: Accumulator,
    key: str,
    plan: CompiledPlan,
    weight: float = 1.0,
    rows: NDArray[np.int64] | None = None,
) -> None:
    """Count an update of a plan, with the rows of the labels that it holds or all, in what entries
    are divided by.
    """
    group = state.groups.get(key)
    if group is None:
        most = max(
            [
                state.layout.classes,
                *(state.layout.axes[axis].size for axis in state.layout.label_axes),
            ]
        )
        group = state.groups[key] = _Group(plan, 0.0, np.zeros(most))
    group.weight += weight
    group.by_label[slice(None) if rows is None else rows] += weight
    state.updates += 1


def _add(total: Floats, box: Region, update: NDArray[Any], weight: float, scratch: Floats) -> None:
    part = update[box.part]
    if not all(isinstance(index, slice) for index in box.whole):
        total[box.whole] += part if weight == 1.0 else part * np.float32(weight)
        return
    view = total[box.whole]
    if weight == 1.0:
        np.add(view, part, out=view)
        return
    for place in _pieces(part.shape, scratch.size):
        piece = part[place]
        product = scratch[: piece.size].reshape(piece.shape)
        np.multiply(piece, np.float32(weight), out=product)
        np.add(view[place], product, out=view[place])


def _pieces(shape: tuple[int, ...], values: int) -> Iterable[tuple[Any, ...]]:
    """Cut an array into pieces of at most ``values`` entries, rows together where they fit."""
    if not shape:
        return [()]
    inner = int(np.prod(shape[1:], dtype=np.int64))
    if inner > values:
        return [(row, *place) for row in range(shape[0]) for place in _pieces(shape[1:], values)]
    step = max(1, values // max(1, inner))
    return [(slice(first, first + step),) for first in range(0, shape[0], step)]


def coverage(state: Accumulator, name: str) -> Floats:
    """The total weight behind every entry, float32, broadcastable to the parameter: uncut
    dimensions have length 1.
    """
    axes = state.layout.labelled
    held = [
        (group, group.plan.tensors[name])
        for group in state.groups.values()
        if name in group.plan.tensors
    ]
    shape = next(item.shape for item in state.layout.parameters if item.name == name)
    labelled = [dim.axis in axes for dim in held[0][1].dims] if held else [False] * len(shape)
    shared = [
        not labelled[at] and all(tensor.runs[at] == (Run(0, 0, size),) for _, tensor in held)
        for at, size in enumerate(shape)
    ]
    total = np.zeros(
        [1 if alone else size for alone, size in zip(shared, shape, strict=True)],
        np.float32,
    )
    for group, tensor in held:
        _add_coverage(total, shared, labelled, group, tensor, state.factor(group.plan, name))
    return total


def _add_coverage(
    count: Floats,
    shared: list[bool],
    labelled: list[bool],
    group: _Group,
    tensor: CompiledTensor,
    factor: float,
) -> None:
    amount: Any = np.float32(group.weight * factor)
    for at, by_label in enumerate(labelled):
        if by_label:
            inner = tensor.dims[at].inner
            column = np.repeat(
                (group.by_label[: tensor.shape[at] // inner] * factor).astype(np.float32),
                inner,
            )
            amount = column.reshape([-1 if other == at else 1 for other in range(len(labelled))])
    if all(isinstance(index, slice) for box in tensor.regions for index in box.whole):
        for box in tensor.regions:
            place = tuple(
                slice(0, 1) if alone else index
                for alone, index in zip(shared, box.whole, strict=True)
            )
            np.add(count[place], amount, out=count[place])
        return
    # Scattered units: one pass over the mesh of what is kept along each cut dimension.
    kept = [
        np.zeros(1, np.int64)
        if alone
        else np.concatenate([np.arange(run.start, run.start + run.length) for run in runs])
        for alone, runs in zip(shared, tensor.runs, strict=True)
    ]
    count[np.ix_(*kept)] += amount


def finish(state: Accumulator, old: Tensors) -> dict[str, NDArray[np.float32]]:
    """Divide the sums, which become the new weights.

    Entries that no update covers keep the bits of the old ones.

    An accumulator that is spent already is a PlanError.
    """
    if state.spent:
        raise PlanError("this accumulator was finished already")
    state.spent = True
    for name, total in state.sums.items():
        held = coverage(state, name)
        bare = held == 0
        if bare.any():
            held[bare] = 1
            np.divide(total, held, out=total)
            np.copyto(total, old[name], where=bare)
        else:
            np.divide(total, held, out=total)
    return state.sums
