"""FedRolex' ablation: devices that hold an entry weigh by the width of their layer, which differs from layer to layer.

Alam et al., NeurIPS 2022 (see `broker_server.strategies.fedrolex`); specification 2.3. It weights the devices that hold
an entry by the width of their layer (``width``), by how often the entry was updated before (``updates``), or by the
product. The count of past updates is the same for every device that holds the entry, so it cancels: ``updates`` is the
plain average and ``updates_width`` is ``width``. (The released code counts while it adds, which makes later devices
heavier; that is not copied.)
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import ConfigError
from models.layout import Layout, Parameter
from models.slicing import CompiledPlan, Tensors

Weighting = Literal["avg", "width", "updates", "updates_width"]
_BY_WIDTH = frozenset({"width", "updates_width"})


@dataclass
class WidthMerge:
    """The running state of a merge whose weights differ from layer to layer.

    It keeps two arrays of the size of the model, twice what `broker_server.strategies.accumulator` keeps: it serves the
    ablation.

    Attributes:
        layout: the global model.
        weighting: which ablation.
        sums: weighted sums by name.
        totals: total weights by name, of the same shapes.
    """

    layout: Layout
    weighting: Weighting
    sums: dict[str, NDArray[Any]]
    totals: dict[str, NDArray[Any]]


def start_width(layout: Layout, weighting: Weighting) -> WidthMerge:
    """An empty merge.

    Raises:
        ConfigError: there is no such weighting.
    """
    if weighting not in get_args(Weighting):
        raise ConfigError(f"unknown weighting {weighting!r}; choose one of {', '.join(get_args(Weighting))}")
    zeros = [{item.name: np.zeros(item.shape, np.float32) for item in layout.parameters} for _ in range(2)]
    return WidthMerge(layout, weighting, zeros[0], zeros[1])


def fold_width(state: WidthMerge, plan: CompiledPlan, update: Tensors, *, labels: Iterable[int] | None = None) -> None:
    """Add one update.

    Args:
        state: changed in place.
        plan: what the update holds.
        update: the sub-model's parameters by name, float32.
        labels: labels in the device's data; None takes every row of the label axes.

    Raises:
        PlanError: the update is not one of this plan; nothing was added.
    """
    rows = None
    if labels is not None:
        held = np.unique(np.fromiter(labels, np.int64))
        rows = {name: held for name in state.layout.label_axes if state.layout.axes[name].size == state.layout.classes}
    factors = {
        item.name: np.float32(_factor(state, item, plan))
        for item in state.layout.parameters
        if item.name in plan.tensors
    }
    plan.scatter_add(state.sums, {name: update[name] * factor for name, factor in factors.items()}, rows)
    amounts = {name: np.full(plan.tensors[name].local_shape, factor) for name, factor in factors.items()}
    plan.scatter_add(state.totals, amounts, rows)


def _factor(state: WidthMerge, item: Parameter, plan: CompiledPlan) -> float:
    """n_out of the device's layer: its rows, or the columns of an embedding table."""
    if state.weighting not in _BY_WIDTH or not item.shape:
        return 1.0
    shape = plan.tensors[item.name].local_shape
    cut = [state.layout.is_cut(dim) for dim in item.dims]
    table = not cut[0] and item.dims[0].axis not in state.layout.label_axes
    if table and True in cut:
        return float(shape[cut.index(True)])
    return float(shape[0])


def finish_width(state: WidthMerge, old: Tensors) -> dict[str, NDArray[Any]]:
    """Divide the sums: the new weights, in layout order.

    Args:
        state: a merge; its arrays are reused.
        old: the weights the round started from; entries that no update covers keep their bits.
    """
    for name, total in state.totals.items():
        bare = total == 0
        total[bare] = 1
        np.divide(state.sums[name], total, out=state.sums[name])
        np.copyto(state.sums[name], old[name], where=bare)
    return state.sums
