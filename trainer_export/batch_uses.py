"""Records how a traced program uses its batch size, so that other widths are traced faster.

Tracing with a symbolic size takes PyTorch twice as long as with a number. So the first tier of an
export is traced with a symbol, and the others with a prime that divides none of their sizes:
multiples of the prime stand for multiples of the batch. This is valid if the same operators give
multiples of the batch in the same places as in the first tier, and no other expression of it; any
other program is traced with a symbol, too. All graphs are compared with PyTorch at other batch
sizes.
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
"""Uses of the batch size, by the names of a graph and its inputs.

Each use is an operator that takes the batch size or moves it within a shape, with its places in
arguments and results; None for a program that must be traced with a symbol.
"""

_MARKS = (10007, 10009)  # primes above any size in a model
_BATCH = sympy.Symbol("batch", integer=True, positive=True)


def mark_of(ports: Sequence[Port]) -> int | None:
    """Return a batch size that divides no other size, if there is one."""
    sizes = []
    for port in ports:
        for size in port.shape:
            if isinstance(size, int):
                sizes.append(size)
    for mark in _MARKS:
        if all(size % mark for size in sizes):
            return mark
    return None


def describe(program: fx.GraphModule, mark: int | None) -> None:
    """Replace a program's fake tensors by specs, and its sizes by expressions of the batch.

    Args:
        program: the traced program; it is modified.
        mark: the number used as batch size; None if the program was traced with a symbol.
    """

    def described(value: Any) -> Any:
        if isinstance(value, Tensor):
            return Spec(tuple(map(described, value.shape)), value.dtype)
        if isinstance(value, torch.SymInt):
            return dim_of(value)
        # A bool is not a size, although Python treats it as a number.
        if mark and type(value) is int and value and value % mark == 0:
            return value // mark * _BATCH
        return value

    for node in program.graph.nodes:
        node.meta["val"] = tree_map(described, node.meta.get("val"))
        args = map_aggregate(node.args, described)
        kwargs = map_aggregate(node.kwargs, described)
        node.args = args
        node.kwargs = kwargs


def uses_of(program: fx.GraphModule) -> list[Any] | None:
    """Return where a program uses its batch size; None if a use is not a multiple of it."""
    uses: list[Any] = []
    for node in program.graph.nodes:
        result = node.meta["val"]
        if isinstance(result, (sympy.Basic, int)):
            continue  # a size: it is counted where an operator takes it
        arguments = _arguments(node)
        taken = _batches(arguments)
        returned = []
        for leaf in tree_leaves(result):
            if isinstance(leaf, Spec):
                returned.append(_batches(leaf.shape))
        if not all(_are_multiples(sizes) for sizes in (taken, *returned)):
            return None
        first = _batches(arguments[0].shape) if _is_tensor_first(arguments) else {}
        moves_batch = any(returned) and returned != [first]
        if taken or moves_batch:
            uses.append((node.target, *taken, *map(tuple, returned)))
    return uses


def _arguments(node: fx.Node) -> list[Any]:
    """Return all arguments of a node, with values for nodes."""
    leaves = tree_leaves((node.args, node.kwargs))
    arguments = []
    for leaf in leaves:
        arguments.append(leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf)
    return arguments


def _is_tensor_first(arguments: Sequence[Any]) -> bool:
    return bool(arguments) and isinstance(arguments[0], Spec)


def _are_multiples(sizes: dict[int, Any]) -> bool:
    """Return whether every expression of the batch size is a multiple of it."""
    return all(
        isinstance(size, sympy.Expr) and size.as_coeff_Mul()[1].is_Symbol for size in sizes.values()
    )


def _batches(sizes: Sequence[Any]) -> dict[int, Any]:
    """Return the expressions of the batch size, by place."""
    kinds = (sympy.Basic, torch.SymFloat, torch.SymBool)
    batches = {}
    for place, size in enumerate(sizes):
        if isinstance(size, kinds):
            batches[place] = size
    return batches
