"""Computes the divisors of a merge: the total weight of the updates behind every entry.

See `broker_server.strategies.accumulator`. Nothing is counted entry by entry while updates arrive.
Each plan has one total, and the divisor of an entry is the sum of the totals of the plans that
contain the entry; on a label axis, only of their updates that have the row's label.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.layout import Layout
from models.slicing import CompiledPlan, CompiledTensor, Region, Run

Floats = NDArray[np.float32]


@dataclass
class PlanTotals:
    """The updates that were cut by one plan.

    Attributes:
        weight: their total weight.
        by_label: for each label, the total weight of the updates that contain its row,
            float64.
    """

    plan: CompiledPlan
    weight: float
    by_label: NDArray[np.float64]


@dataclass(frozen=True)
class _Dimensions:
    """The dimensions of one parameter.

    Attributes:
        labelled: for each axis, whether it is a label axis, whose rows count by label.
        shared: for each, whether all its positions have one divisor, because no plan cuts it.
    """

    labelled: list[bool]
    shared: list[bool]


def coverage_of(
    layout: Layout,
    name: str,
    totals: Sequence[PlanTotals],
    factor: Callable[[CompiledPlan, str], float],
) -> Floats:
    """Return the total weight behind every entry of a parameter, as an array that broadcasts to it.

    Args:
        layout: the global model.
        name: the parameter.
        totals: the totals of every plan in use.
        factor: the factor of an update's weight for one tensor.
    """
    shape = _shape_of(layout, name)
    holders: list[PlanTotals] = []
    tensors: list[CompiledTensor] = []
    for plan_totals in totals:
        tensor = plan_totals.plan.tensors.get(name)
        # A shallow plan lacks the parameters of deeper blocks.
        if tensor is not None:
            holders.append(plan_totals)
            tensors.append(tensor)
    dimensions = _dimensions(layout, shape, tensors)
    # A dimension with one divisor has length 1, which broadcasts.
    count_shape = list(shape)
    for axis, is_shared in enumerate(dimensions.shared):
        if is_shared:
            count_shape[axis] = 1
    count = np.zeros(count_shape, np.float32)
    for plan_totals, tensor in zip(holders, tensors, strict=True):
        amount = _amount(
            plan_totals,
            tensor,
            dimensions,
            factor(plan_totals.plan, name),
        )
        _add_amount(
            count,
            tensor,
            dimensions,
            amount,
        )
    return count


def _shape_of(layout: Layout, name: str) -> tuple[int, ...]:
    for parameter in layout.parameters:
        if parameter.name == name:
            return parameter.shape
    raise KeyError(name)


def _dimensions(
    layout: Layout,
    shape: tuple[int, ...],
    tensors: Sequence[CompiledTensor],
) -> _Dimensions:
    labelled = [False] * len(shape)
    if tensors:
        # All plans have the same dimensions; they cut them at different lengths.
        label_axes = layout.labelled
        for axis, dim in enumerate(tensors[0].dims):
            labelled[axis] = dim.axis in label_axes
    shared = []
    for axis, size in enumerate(shape):
        uncut = (Run(0, 0, size),)
        is_uncut = all(tensor.runs[axis] == uncut for tensor in tensors)
        shared.append(is_uncut and not labelled[axis])
    return _Dimensions(labelled, shared)


def _amount(
    totals: PlanTotals,
    tensor: CompiledTensor,
    dimensions: _Dimensions,
    factor: float,
) -> Any:
    """Return a plan's addition to every entry that it contains: a number, or a column by row."""
    amount: Any = np.float32(totals.weight * factor)
    for axis, is_labelled in enumerate(dimensions.labelled):
        if not is_labelled:
            continue
        # A label has `inner` consecutive rows.
        inner = tensor.dims[axis].inner
        weights = totals.by_label[: tensor.shape[axis] // inner] * factor
        column = np.repeat(weights.astype(np.float32), inner)
        column_shape = [1] * len(dimensions.labelled)
        column_shape[axis] = -1
        amount = column.reshape(column_shape)
    return amount


def _add_amount(
    count: Floats,
    tensor: CompiledTensor,
    dimensions: _Dimensions,
    amount: Any,
) -> None:
    if any(_is_scattered(region) for region in tensor.regions):
        _add_scattered(
            count,
            tensor,
            dimensions,
            amount,
        )
        return
    for region in tensor.regions:
        place = list(region.whole)
        for axis, is_shared in enumerate(dimensions.shared):
            if is_shared:
                place[axis] = slice(0, 1)
        view = count[tuple(place)]
        np.add(view, amount, out=view)


def _is_scattered(region: Region) -> bool:
    """Whether the units of a region have gaps between them, so that no slice describes them."""
    return not all(isinstance(index, slice) for index in region.whole)


def _add_scattered(
    count: Floats,
    tensor: CompiledTensor,
    dimensions: _Dimensions,
    amount: Any,
) -> None:
    """Add at scattered units, in one pass over the mesh of the kept ones."""
    kept = []
    for is_shared, runs in zip(dimensions.shared, tensor.runs, strict=True):
        if is_shared:
            kept.append(np.zeros(1, np.int64))
        else:
            ranges = [np.arange(run.start, run.start + run.length) for run in runs]
            kept.append(np.concatenate(ranges))
    count[np.ix_(*kept)] += amount
