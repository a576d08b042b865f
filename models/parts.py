"""Parts of a model by name, for methods that share or keep only some of them.

A part is a block (``stem``, ``block1`` ..., ``head``), a module by its path (``trunk``,
``hidden.0``), a parameter, or a pattern of such names (``stem.norm*``, ``*.bias``), in which ``*``
stands for any characters, ``?`` for one, and ``[ab]`` for one of some.
"""

from collections.abc import Collection
from fnmatch import fnmatchcase

from fleet_protocol.errors import PlanError
from models.layout import Layout
from models.parameters import Parameter, Statistic


def in_parts(tensor: Parameter | Statistic, parts: Collection[str]) -> bool:
    """Return whether a parameter or norm of a layout belongs to one of the parts."""
    return any(_lies_in(tensor, pattern) for pattern in parts)


def _lies_in(tensor: Parameter | Statistic, part: str) -> bool:
    if fnmatchcase(tensor.block, part):
        return True
    # A pattern may name a module, and so all that lies below it.
    name = tensor.name
    return fnmatchcase(name, part) or fnmatchcase(name, f"{part}.*")


def parameters_in(layout: Layout, parts: Collection[str]) -> tuple[str, ...]:
    """Return the names of the parameters in some parts, in registration order.

    Raises:
        PlanError: a part has no parameter.
    """
    for path in parts:
        if not any(in_parts(parameter, (path,)) for parameter in layout.parameters):
            raise _unknown_part(layout, path)
    # Not part by part, because parts may overlap and the order must be that of the layout.
    names: list[str] = []
    for parameter in layout.parameters:
        if in_parts(parameter, parts):
            names.append(parameter.name)
    return tuple(names)


def _unknown_part(layout: Layout, path: str) -> PlanError:
    blocks: set[str] = set()
    modules: dict[str, None] = {}  # a set in registration order
    for parameter in layout.parameters:
        blocks.add(parameter.block)
        modules[parameter.name.partition(".")[0]] = None
    return PlanError(
        f"{layout.arch} has neither a block nor a module {path}; its blocks are"
        f" {', '.join(sorted(blocks))}, its modules {', '.join(modules)}"
    )
