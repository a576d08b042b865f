"""Records how a traced program uses its batch size, so that other widths are traced faster.

Tracing with a symbolic size takes PyTorch twice as long as with a number. So the first tier of an
export is traced with a symbol, and the others with a prime that divides none of their sizes:
multiples of the prime stand for multiples of the batch, and one less stands for one less, as in an
unbiased variance. This is valid if each operator that takes or moves the batch does so as one in
the first tier, and no program has another expression of it; any other program is traced with a
symbol, too. All graphs are compared with PyTorch at other batch sizes.
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
        if all(_expression(size, mark) is None for size in sizes):
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
        if mark and type(value) is int:
            expression = _expression(value, mark)
            return value if expression is None else expression
        return value

    for node in program.graph.nodes:
        node.meta["val"] = tree_map(described, node.meta.get("val"))
        args = map_aggregate(node.args, described)
        kwargs = map_aggregate(node.kwargs, described)
        node.args = args
        node.kwargs = kwargs


def _expression(value: int, mark: int) -> Any:
    """Return the expression of the batch that a number stands for; None if it is another size."""
    if value <= 0:
        return None
    if value % mark == 0:
        return value // mark * _BATCH
    if value % mark == mark - 1:
        return (value + 1) // mark * _BATCH - 1
    return None


def uses_of(program: fx.GraphModule) -> list[Any] | None:
    """Return where a program uses its batch size.

    It is None if a use is neither a multiple of the batch size nor one less.
    """
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
        if not all(_are_counts(sizes) for sizes in (taken, *returned)):
            return None
        first = _batches(arguments[0].shape) if _is_tensor_first(arguments) else {}
        moves_batch = any(returned) and returned != [first]
        if taken or moves_batch:
            uses.append((node.target, _places(taken), *map(_places, returned)))
    return uses


def has_only_uses(program: fx.GraphModule, known: Sequence[Any] | None) -> bool:
    """Return whether a program uses its batch size in no other way than another program.

    A narrow tier may leave out what changes nothing at its sizes, such as a copy of one channel.
    """
    uses = uses_of(program)
    return uses is not None and known is not None and set(known).issuperset(uses)


def _places(sizes: dict[int, Any]) -> tuple[tuple[int, int], ...]:
    """Return the places of expressions of the batch size, with 0 or -1 for what is added."""
    places: list[tuple[int, int]] = []
    for place, size in sizes.items():
        added, _ = size.as_coeff_Add()
        places.append((place, int(added)))
    return tuple(places)


def _arguments(node: fx.Node) -> list[Any]:
    """Return all arguments of a node, with values for nodes."""
    leaves = tree_leaves((node.args, node.kwargs))
    arguments = []
    for leaf in leaves:
        arguments.append(leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf)
    return arguments


def _is_tensor_first(arguments: Sequence[Any]) -> bool:
    return bool(arguments) and isinstance(arguments[0], Spec)


def _are_counts(sizes: dict[int, Any]) -> bool:
    """Return whether every expression of the batch size is a multiple of it, or one less."""
    for size in sizes.values():
        if not isinstance(size, sympy.Expr) or not _is_count(size):
            return False
    return True


def _is_count(size: sympy.Expr) -> bool:
    shift, multiple = size.as_coeff_Add()
    return shift in {0, -1} and bool(multiple.as_coeff_Mul()[1].is_Symbol)


def _batches(sizes: Sequence[Any]) -> dict[int, Any]:
    """Return the expressions of the batch size, by place."""
    kinds = (sympy.Basic, torch.SymFloat, torch.SymBool)
    batches = {}
    for place, size in enumerate(sizes):
        if isinstance(size, kinds):
            batches[place] = size
    return batches
