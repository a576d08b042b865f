"""Slicing: the boxes of a tensor that a sub-model keeps, and their copies.

The kept units of a dimension are stored as runs of consecutive units. The boxes of a tensor are the
products of the runs of its dimensions: a static plan copies one box, a rolling plan at most two
along each axis, each at memory speed.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_protocol.errors import PlanError
from models.dims import Dim
from models.draws import Indices
from models.layout import Layout

MAX_BOXES = 128
"""With more boxes than this, a tensor is copied by one fancy index.

Each box costs about a microsecond, however small.
"""

Tensors = Mapping[str, NDArray[Any]]


class Run(NamedTuple):
    """A run of consecutive entries of one dimension."""

    start: int  # the first, in the global tensor
    local: int  # the same in the local tensor
    length: int


class Region(NamedTuple):
    """The same entries of the global tensor, `whole`, and of the local one, `part`.

    Both are slices, or an open mesh over the leading dimensions.
    """

    whole: tuple[Any, ...]
    part: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class CompiledTensor:
    """The part of one tensor that a plan keeps."""

    name: str
    dims: tuple[Dim, ...]
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]  # of each dimension
    regions: tuple[Region, ...]  # where no label rule applies

    def positions(self) -> tuple[Indices, ...]:
        """Return for each dimension the positions of the local entries in the global tensor."""
        positions: list[Indices] = []
        for runs in self.runs:
            ranges = [np.arange(run.start, run.start + run.length) for run in runs]
            positions.append(np.concatenate(ranges))
        return tuple(positions)


@dataclass(frozen=True, eq=False)
class CompiledPlan:
    """A compiled plan for many updates.

    Statistics may be missing in sliced or merged weights; parameters are required.
    """

    title: str
    tensors: Mapping[str, CompiledTensor]  # parameters in registration order, then statistics
    required: frozenset[str]
    label_axes: frozenset[str]  # axes whose rows a label rule may restrict

    def slice(self, weights: Tensors) -> dict[str, NDArray[Any]]:
        """Cut the sub-model's tensors out of global ones; see `models.plan.slice_weights`."""
        cut: dict[str, NDArray[Any]] = {}
        for tensor in self._present(weights):
            source = weights[tensor.name]
            if source.shape != tensor.shape:
                raise PlanError(
                    f"{self.title}: tensor {tensor.name} of the global weights should be "
                    f"{tensor.shape} but is {source.shape}"
                )
            cut[tensor.name] = _cut_out(tensor, source)
        return cut

    def without(self, names: Collection[str]) -> "CompiledPlan":
        """Return the plan of what is left when some parameters stay where they are."""
        if not names:
            return self
        tensors: dict[str, CompiledTensor] = {}
        for name, tensor in self.tensors.items():
            if name not in names:
                tensors[name] = tensor
        return replace(
            self,
            tensors=MappingProxyType(tensors),
            required=self.required.difference(names),
        )

    def _present(self, weights: Tensors) -> list[CompiledTensor]:
        """Return the tensors that weights have; all required ones must be present."""
        missing = self.required - weights.keys()
        if missing:
            first = next(name for name in self.tensors if name in missing)
            raise PlanError(
                f"{self.title}: tensor {first} is missing ({len(missing)} missing in all)"
            )
        present: list[CompiledTensor] = []
        for name, tensor in self.tensors.items():
            if name in weights:
                present.append(tensor)
        return present


def compile_tensor(
    layout: Layout,
    name: str,
    dims: Sequence[Dim],
    units: Sequence[Mapping[str, Indices]],
) -> CompiledTensor:
    """Find the runs and boxes of one tensor.

    Args:
        layout: the global model.
        name: name of the tensor.
        dims: its dimensions.
        units: the kept units of its axes, for each dimension; other axes are whole.
    """
    shape = layout.local_shape(dims, 1.0)
    runs_of_dims: list[tuple[Run, ...]] = []
    for size, dim, kept in zip(shape, dims, units, strict=True):
        runs: tuple[Run, ...] = (Run(0, 0, size),)
        if kept:
            entries = dim.entries(layout.axes, kept)
            runs = _runs(entries, 1)
        runs_of_dims.append(runs)
    local_shape = tuple(map(_length, runs_of_dims))
    regions = _regions(shape, runs_of_dims)
    return CompiledTensor(name, tuple(dims), shape, local_shape, tuple(runs_of_dims), regions)


def _length(runs: Sequence[Run]) -> int:
    return sum(run.length for run in runs)


def tensor_regions(
    tensor: CompiledTensor, rows: Mapping[str, Indices] | None = None
) -> tuple[Region, ...]:
    """Return the boxes of a tensor, restricted to some rows of its label axes.

    Args:
        tensor: the tensor.
        rows: ascending rows by label axis; other axes are whole.

    Raises:
        PlanError: a row is outside its axis.
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
            last = size - 1
            raise PlanError(f"rows {kept[0]} to {kept[-1]} of {dim.axis} are outside 0 to {last}")
        # A label axis is never cut, so its rows have the same numbers in the sub-model.
        label_runs: list[Run] = []
        for run in _runs(kept, dim.inner):
            label_runs.append(Run(run.start, run.start, run.length))
        runs[position] = tuple(label_runs)
    return _regions(tensor.shape, runs)


def _runs(units: Indices, inner: int) -> tuple[Run, ...]:
    """Group kept units, in local order, into runs of consecutive ones, counted in entries."""
    if not units.size:
        return ()
    edges = [
        0,
        *(np.flatnonzero(np.diff(units) != 1) + 1).tolist(),
        units.size,
    ]
    runs: list[Run] = []
    for first, last in itertools.pairwise(edges):
        runs.append(
            Run(
                int(units[first]) * inner,
                first * inner,
                (last - first) * inner,
            )
        )
    return tuple(runs)


def _regions(shape: tuple[int, ...], runs: Sequence[tuple[Run, ...]]) -> tuple[Region, ...]:
    """Return the products of the runs of all dimensions."""
    if not runs:
        # A scalar: an empty index would copy it instead of giving a view.
        return (Region((...,), (...,)),)
    if math.prod(map(len, runs)) <= MAX_BOXES:
        return tuple(map(_box, itertools.product(*runs)))
    # Trailing whole dimensions are not part of the mesh, so that their entries are still copied
    # together.
    depth = 0
    for position, (row, size) in enumerate(zip(runs, shape, strict=True), 1):
        if row != (Run(0, 0, size),):
            depth = position
    whole_entries: list[Indices] = []
    part_entries: list[Indices] = []
    for row in runs[:depth]:
        whole_ranges: list[Indices] = []
        part_ranges: list[Indices] = []
        for run in row:
            whole_ranges.append(_entries(run.start, run.length))
            part_ranges.append(_entries(run.local, run.length))
        whole_entries.append(np.concatenate(whole_ranges))
        part_entries.append(np.concatenate(part_ranges))
    return (Region(np.ix_(*whole_entries), np.ix_(*part_entries)),)


def _box(runs: Sequence[Run]) -> Region:
    whole_slices: list[slice] = []
    part_slices: list[slice] = []
    for run in runs:
        whole_slices.append(slice(run.start, run.start + run.length))
        part_slices.append(slice(run.local, run.local + run.length))
    return Region(tuple(whole_slices), tuple(part_slices))


def _entries(start: int, length: int) -> Indices:
    return np.arange(start, start + length, dtype=np.int64)


def _cut_out(tensor: CompiledTensor, source: NDArray[Any]) -> NDArray[Any]:
    """Return the kept part of a tensor.

    It is a view of a read-only array, such as a mapped file, if possible, otherwise a copy.
    """
    if len(tensor.regions) == 1 and not source.flags.writeable:
        view: NDArray[Any] = source[tensor.regions[0].whole]
        is_view = view.flags.c_contiguous and np.may_share_memory(view, source)
        if view.shape == tensor.local_shape and is_view:
            return view
    local = np.empty(tensor.local_shape, dtype=source.dtype)
    for region in tensor.regions:
        local[region.part] = source[region.whole]
    return local
