"""Where a traced program uses the size of its batch, by which a program of other widths is traced
in half the time.

PyTorch takes twice as long with a symbol for a size as with a number. So the first tier of an
export is traced with a symbol, and others with a prime that divides none of their sizes: its
multiples are the batch. That holds where the same operators lead to multiples of the batch in the
same places as in the first, and to nothing else made of it; any other program is traced with a
symbol, too. All that is written is compared with PyTorch at other sizes of the batch.
"""

from collections.abc import Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves, tree_map

from trainer_export.graph import Port
from trainer_export.lowering.values import Spec, dim_of

Known = dict[tuple[str, ...], list[Any] | None]
"""By the names of a graph and its inputs: the operators that take the batch or put it elsewhere in
a shape, with its places in what they take and return; None for a program that must be traced with a
symbol.
"""

_MARKS = (10007, 10009)
_BATCH = sympy.Symbol("batch", integer=True, positive=True)


def mark_of(ports: Sequence[Port]) -> int | None:
    """A number for the batch that divides no other size, if there is one."""
    sizes = [size for port in ports for size in port.shape if isinstance(size, int)]
    return next((mark for mark in _MARKS if all(size % mark for size in sizes)), None)


def describe(program: fx.GraphModule, mark: int | None) -> None:
    """Put specs in the place of a program's fake tensors, and expressions in that of sizes.

    A symbol has no mark.
    """

    def sized(value: Any) -> Any:
        if isinstance(value, Tensor):
            return Spec(tuple(map(sized, value.shape)), value.dtype)
        if isinstance(value, torch.SymInt):
            return dim_of(value)
        return (
            value // mark * _BATCH
            if mark and type(value) is int and value and value % mark == 0
            else value
        )

    for node in program.graph.nodes:
        node.meta["val"] = tree_map(sized, node.meta.get("val"))
        node.args, node.kwargs = (
            map_aggregate(node.args, sized),
            map_aggregate(node.kwargs, sized),
        )


def uses_of(program: fx.GraphModule) -> list[Any] | None:
    """Where a described program uses its batch; None if not everywhere as a multiple."""
    found: list[Any] = []
    for node in program.graph.nodes:
        made = node.meta["val"]
        if isinstance(made, (sympy.Basic, int)):
            continue  # a size: it counts where it is taken
        taking = tree_leaves((node.args, node.kwargs))
        numbers = [item.meta["val"] if isinstance(item, fx.Node) else item for item in taking]
        taken = _batches(numbers)
        given = [_batches(item.shape) for item in tree_leaves(made) if isinstance(item, Spec)]
        made_of_it = [size for sizes in (taken, *given) for size in sizes.values()]
        if not all(
            isinstance(size, sympy.Expr) and size.as_coeff_Mul()[1].is_Symbol for size in made_of_it
        ):
            return None
        first = _batches(numbers[0].shape) if numbers and isinstance(numbers[0], Spec) else {}
        if taken or (any(given) and given != [first]):
            found.append((node.target, *taken, *map(tuple, given)))
    return found


def _batches(sizes: Sequence[Any]) -> dict[int, Any]:
    """What is made of the batch, by place."""
    kinds = (sympy.Basic, torch.SymFloat, torch.SymBool)
    return {place: size for place, size in enumerate(sizes) if isinstance(size, kinds)}
