"""Small models written by hand, and the product's merge applied to them."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker_server.strategies import accumulator as merge
from models import Axis, Dim, Layout, Parameter, Plan, compile_plan
from models.block_names import HEAD, STEM

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
    blocks: Mapping[str, str] = MappingProxyType({}),
    labels: str | None = None,
) -> Layout:
    """A layout of the given tensors.

    Args:
        axes: all of them.
        tensors: the axes of each parameter's dimensions.
        blocks: names by parameter, ``block1`` and so on for depth units; the rest is in the head.
        labels: name of the axis with a row for each label, if there is one.
    """
    by_name = {axis.name: axis for axis in axes}
    depth = max(1, len(set(blocks.values()) - {STEM, HEAD}))
    return Layout(
        arch="worked_example",
        settings={},
        axes=by_name,
        parameters=tuple(
            Parameter(
                name,
                tuple(by_name[dim.axis].size * dim.inner for dim in dims),
                dims,
                blocks.get(name, HEAD),
            )
            for name, dims in tensors.items()
        ),
        statistics=(),
        depth=depth,
        depths=tuple(range(1, depth + 1)),
        label_axes=() if labels is None else (labels,),
        input_shape=(1,),
        input_dtype="float32",
        classes=1 if labels is None else by_name[labels].size,
    )


def square(size: int) -> Layout:
    """One weight ``W`` whose rows and columns carry the same axis ``k``."""
    return layout_of([Axis("k", size)], {"W": (Dim("k"), Dim("k"))})


def average(
    layout: Layout, weights: Mapping[str, Any], clients: Sequence[Client]
) -> tuple[dict[str, NDArray[np.float32]], dict[str, NDArray[np.float32]]]:
    """Merge what clients returned, by `broker_server.strategies.accumulator`.

    Returns:
        The new weights, and for every entry the number of clients that counted.
    """
    state = merge.start(layout)
    for number, (plan, returned, labels) in enumerate(clients):
        update = {name: float32(value) for name, value in returned.items()}
        merge.fold(state, f"client{number}", compile_plan(layout, plan), update, labels=labels)
    counts = {
        item.name: np.broadcast_to(merge.coverage(state, item.name), item.shape)
        for item in layout.parameters
    }
    return merge.finish(state, {name: float32(value) for name, value in weights.items()}), counts
