"""Small models written by hand, and the product's merge applied to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker_server import merge
from models import Axis, Dim, Layout, Parameter, Plan, compile_plan

__all__ = ["Client", "average", "float32", "layout_of", "square"]

Client = tuple[Plan, Mapping[str, Any], Sequence[int] | None]
"""A device's plan, the tensors it returned, and its labels (None where no label rule applies)."""


def float32(value: Any) -> NDArray[np.float32]:
    """A value of a file as the product carries weights."""
    return np.asarray(value, np.float32)


def layout_of(
    axes: Iterable[Axis],
    tensors: Mapping[str, tuple[Dim, ...]],
    *,
    blocks: Mapping[str, str] | None = None,
    depth: int = 1,
    label_axes: tuple[str, ...] = (),
    classes: int = 1,
) -> Layout:
    """A layout of the given tensors, all in the head unless `blocks` says otherwise."""
    by_name = {axis.name: axis for axis in axes}
    return Layout(
        arch="worked_example",
        settings={},
        axes=by_name,
        parameters=tuple(
            Parameter(
                name, tuple(by_name[dim.axis].size * dim.inner for dim in dims), dims, (blocks or {}).get(name, "head")
            )
            for name, dims in tensors.items()
        ),
        statistics=(),
        depth=depth,
        depths=tuple(range(1, depth + 1)),
        label_axes=label_axes,
        input_shape=(1,),
        input_dtype="float32",
        classes=classes,
    )


def square(size: int) -> Layout:
    """One weight ``W`` whose rows and columns carry the same axis ``k``."""
    return layout_of([Axis("k", size)], {"W": (Dim("k"), Dim("k"))})


def average(
    layout: Layout, weights: Mapping[str, Any], clients: Sequence[Client]
) -> tuple[dict[str, NDArray[np.float32]], dict[str, NDArray[np.float32]]]:
    """Merge what clients returned, by `broker_server.merge`.

    Returns:
        The new weights, and for every entry the number of clients that counted.
    """
    state = merge.start(layout)
    for number, (plan, returned, labels) in enumerate(clients):
        update = {name: float32(value) for name, value in returned.items()}
        merge.fold(state, f"client{number}", compile_plan(layout, plan), update, labels=labels)
    counts = {item.name: np.broadcast_to(merge.coverage(state, item.name), item.shape) for item in layout.parameters}
    return merge.finish(state, {name: float32(value) for name, value in weights.items()}), counts
