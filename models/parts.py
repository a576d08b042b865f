"""Parts of a model by name, for methods that share or keep only some of it.

A part is a block (``stem``, ``block1`` ..., ``head``), a module by its path (``trunk``,
``hidden.0``) or a parameter.
"""

from collections.abc import Collection

from fleet_protocol.errors import PlanError
from models.layout import Layout, Parameter, Statistic


def in_parts(tensor: Parameter | Statistic, parts: Collection[str]) -> bool:
    """Return whether a parameter, or a norm, of a layout lies in one of some parts."""
    return tensor.block in parts or any(_is_below(tensor.name, path) for path in parts)


def _is_below(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def parameters_in(layout: Layout, parts: Collection[str]) -> tuple[str, ...]:
    """Name the parameters in some parts, in registration order.

    Raises:
        PlanError: if a part has no parameter.
    """
    for path in parts:
        if not any(in_parts(parameter, (path,)) for parameter in layout.parameters):
            raise _unknown_part(layout, path)
    # Not part by part: parts may lie in one another, and the order must be that of the layout.
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
        f"{layout.arch} has no block and no module {path}; its blocks are "
        f"{', '.join(sorted(blocks))}, its modules {', '.join(modules)}"
    )
