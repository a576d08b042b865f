"""Slicing: the boxes of a tensor that a sub-model keeps, and the strided copies that cut it out of
a global model.

The kept units of a dimension are stored as runs of consecutive units. The boxes of a tensor are the
products of the runs of its dimensions, so that a static plan moves one box and a rolling one at
most two along each axis, each at the speed of memory.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import PlanError
from models.dims import Dim
from models.draws import Indices
from models.layout import Layout

MAX_BOXES = 128
"""Boxes above which a tensor is moved by one fancy index: each box costs about a microsecond,
however small.
"""

Tensors = Mapping[str, NDArray[Any]]


class Run(NamedTuple):
    """Consecutive entries of one dimension that stay together, from one of the global and one of
    the local tensor.
    """

    start: int
    local: int
    length: int


class Region(NamedTuple):
    """The same entries of the global and the local tensor: slices, or an open mesh over the leading
    dimensions.
    """

    whole: tuple[Any, ...]
    part: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class CompiledTensor:
    """What a plan keeps of one tensor: runs of each dimension, and boxes where no label rule
    applies.
    """

    name: str
    dims: tuple[Dim, ...]
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]
    regions: tuple[Region, ...]


@dataclass(frozen=True, eq=False)
class CompiledPlan:
    """A plan made ready for many updates: every kept tensor by name, parameters in registration
    order, then statistics.

    Statistics may be absent from what is sliced or merged, parameters are required. A label rule
    may restrict `label_axes`.
    """

    title: str
    tensors: Mapping[str, CompiledTensor]
    required: frozenset[str]
    label_axes: frozenset[str]

    def slice(self, weights: Tensors) -> dict[str, NDArray[Any]]:
        """Cut the sub-model's tensors out of global ones; see `models.plan.slice_weights`."""
        cut: dict[str, NDArray[Any]] = {}
        for tensor in self._present(weights):
            source = weights[tensor.name]
            if source.shape != tensor.shape:
                raise PlanError(
                    f"{self.title}: tensor {tensor.name} of the global weights should be {tensor.shape} but is"
                    f" {source.shape}"
                )
            cut[tensor.name] = _in_place(tensor, source)
        return cut

    def _present(self, given: Tensors) -> list[CompiledTensor]:
        missing = self.required - given.keys()
        if missing:
            first = next(name for name in self.tensors if name in missing)
            raise PlanError(
                f"{self.title}: tensor {first} is missing ({len(missing)} missing in all)"
            )
        return [tensor for name, tensor in self.tensors.items() if name in given]


def compile_tensor(
    layout: Layout,
    name: str,
    dims: Sequence[Dim],
    units: Sequence[Mapping[str, Indices]],
) -> CompiledTensor:
    """Find the runs and boxes of one tensor, whose dimensions keep some units of axes.

    All of one that is not named.
    """
    shape = layout.local_shape(dims, 1.0)
    runs = tuple(
        _runs(dim.entries(layout.axes, kept), 1) if kept else (Run(0, 0, size),)
        for size, dim, kept in zip(shape, dims, units, strict=True)
    )
    local_shape = tuple(sum(run.length for run in row) for row in runs)
    return CompiledTensor(name, tuple(dims), shape, local_shape, runs, _regions(shape, runs))


def tensor_regions(
    tensor: CompiledTensor, rows: Mapping[str, Indices] | None = None
) -> tuple[Region, ...]:
    """List the boxes of a tensor, restricted to some rows, ascending, of its label axes.

    Axes not named are whole.

    A PlanError says that a row lies outside its axis.
    """
    if not rows:
        return tensor.regions
    runs = list(tensor.runs)
    for position, dim in enumerate(tensor.dims):
        if dim.axis not in rows:
            continue
        kept = rows[dim.axis]
        size = tensor.shape[position] // dim.inner
        if kept.size and not (kept[0] >= 0 and kept[-1] < size):
            raise PlanError(
                f"rows {kept[0]} to {kept[-1]} of {dim.axis} are outside 0 to {size - 1}"
            )
        # A label axis is never cut, so its rows have the same numbers in the sub-model.
        runs[position] = tuple(
            Run(run.start, run.start, run.length) for run in _runs(kept, dim.inner)
        )
    return _regions(tensor.shape, tuple(runs))


def _runs(units: Indices, inner: int) -> tuple[Run, ...]:
    """Group kept units, in local order, into runs of consecutive ones, counted in entries."""
    if not units.size:
        return ()
    edges = [0, *(np.flatnonzero(np.diff(units) != 1) + 1).tolist(), units.size]
    return tuple(
        Run(int(units[first]) * inner, first * inner, (last - first) * inner)
        for first, last in itertools.pairwise(edges)
    )


def _regions(shape: tuple[int, ...], runs: tuple[tuple[Run, ...], ...]) -> tuple[Region, ...]:
    if not runs:
        # A scalar: an empty index would copy it out instead of pointing at it.
        return (Region((...,), (...,)),)
    if math.prod(len(row) for row in runs) <= MAX_BOXES:
        return tuple(
            Region(
                tuple(slice(run.start, run.start + run.length) for run in box),
                tuple(slice(run.local, run.local + run.length) for run in box),
            )
            for box in itertools.product(*runs)
        )
    # Trailing whole dimensions stay out of the mesh, so that their entries are still copied
    # together.
    depth = (
        max(position for position, row in enumerate(runs) if row != (Run(0, 0, shape[position]),))
        + 1
    )
    return (
        Region(
            np.ix_(*(_entries([(run.start, run.length) for run in row]) for row in runs[:depth])),
            np.ix_(*(_entries([(run.local, run.length) for run in row]) for row in runs[:depth])),
        ),
    )


def _entries(spans: Sequence[tuple[int, int]]) -> Indices:
    return np.concatenate(
        [np.arange(start, start + length, dtype=np.int64) for start, length in spans]
    )


def _in_place(tensor: CompiledTensor, source: NDArray[Any]) -> NDArray[Any]:
    """What is kept of a tensor: a view where it is one piece of what nobody may write to, such as a
    mapped file.
    """
    if len(tensor.regions) == 1 and not source.flags.writeable:
        piece: NDArray[Any] = source[tensor.regions[0].whole]
        if (
            piece.shape == tensor.local_shape
            and piece.flags.c_contiguous
            and np.may_share_memory(piece, source)
        ):
            return piece
    local = np.empty(tensor.local_shape, dtype=source.dtype)
    for region in tensor.regions:
        local[region.part] = source[region.whole]
    return local
