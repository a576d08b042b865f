"""Small layouts written by hand, and a slow but obvious reference for moving tensors."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models import (
    Axis,
    AxisKind,
    CompiledPlan,
    Dim,
    Layout,
    Parameter,
    Plan,
    Statistic,
    compile_plan,
)
from models.slicing import tensor_regions


def make_layout(
    axes: Iterable[Axis],
    tensors: Mapping[str, tuple[Dim, ...]],
    *,
    blocks: Mapping[str, str] | None = None,
    statistics: tuple[Statistic, ...] = (),
    depth: int = 1,
    label_axes: tuple[str, ...] = (),
) -> Layout:
    """Make a layout of the given tensors, all in the head unless `blocks` says otherwise."""
    by_name = {axis.name: axis for axis in axes}
    parameters = tuple(
        Parameter(
            name,
            tuple(dim.length(by_name, 1.0) for dim in dims),
            dims,
            (blocks or {}).get(name, "head"),
        )
        for name, dims in tensors.items()
    )
    return Layout(
        arch="by_hand",
        settings={"sizes": [1, [2, 3]]},
        axes=by_name,
        parameters=parameters,
        statistics=statistics,
        depth=depth,
        depths=tuple(range(1, depth + 1)),
        label_axes=label_axes,
        input_shape=(3,),
        input_dtype="float32",
        classes=2,
    )


def square(size: int, name: str = "W") -> Layout:
    """One weight with the same width axis on both sides, as in the papers' small examples."""
    axis = Axis("k", size)
    return make_layout([axis], {name: (Dim("k"), Dim("k"))})


def entries(layout: Layout, plan: Plan, parameter: Parameter) -> tuple[NDArray[Any], ...]:
    """Kept entries of each dimension, one by one, as the definition says."""
    mesh = []
    for position, dim in enumerate(parameter.dims):
        listed = []
        start = 0
        for part in dim.segments:
            axis = layout.axes[part.axis]
            units = range(axis.size) if axis.kind is AxisKind.FIXED else plan.indices[part.axis]
            units = [
                int(unit)
                for unit in plan.overrides.get((parameter.name, position, part.axis), units)
            ]
            listed += [start + entry for entry in _loops(axis, part, units)]
            start += len(_loops(axis, part, list(range(axis.size))))
        mesh.append(np.array(listed))
    return np.ix_(*mesh)


def _loops(axis: Axis, part: Dim, units: list[int]) -> list[int]:
    """The loops of a segment, as they are told."""
    size = axis.group_size if part.shared else axis.size
    mapped = units[: len(units) // axis.groups] if part.shared else units
    return [
        (copy * size + unit) * part.inner + spot
        for copy in range(part.outer)
        for unit in mapped
        for spot in range(part.inner)
    ]


def zeros(layout: Layout, dtype: Any = np.float64) -> dict[str, NDArray[Any]]:
    """Zeros of the global shapes."""
    return {item.name: np.zeros(item.shape, dtype) for item in layout.parameters}


def noise(layout: Layout, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Normal random numbers of the global shapes, float32."""
    generator = np.random.default_rng(seed)
    return {
        item.name: generator.standard_normal(item.shape).astype(np.float32)
        for item in layout.parameters
    }


def _compiled(layout: Layout, plan: Plan | CompiledPlan) -> CompiledPlan:
    return plan if isinstance(plan, CompiledPlan) else compile_plan(layout, plan)


def regions(layout: Layout, plan: Plan, parameter: Parameter) -> tuple[Any, ...]:
    """The boxes of a parameter that a plan keeps."""
    return compile_plan(layout, plan).tensors[parameter.name].regions


def scatter(
    layout: Layout, plan: Plan | CompiledPlan, sub: Any, onto: Any
) -> dict[str, NDArray[Any]]:
    """A sub-model's tensors in copies of global ones."""
    merged = {name: np.array(value) for name, value in onto.items()}
    for name, tensor in _compiled(layout, plan).tensors.items():
        for region in tensor.regions if name in sub else ():
            merged[name][region.whole] = sub[name][region.part]
    return merged


def scatter_add(
    layout: Layout, plan: Plan | CompiledPlan, target: Any, update: Any, rows: Any = None
) -> None:
    """A sub-model's tensors, added to global sums in place; of label axes some rows alone."""
    rule = {axis: np.unique(units) for axis, units in (rows or {}).items()}
    for name, tensor in _compiled(layout, plan).tensors.items():
        for region in tensor_regions(tensor, rule) if name in update else ():
            target[name][region.whole] += update[name][region.part]
