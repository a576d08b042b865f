"""Parts of a model by name, for methods that share or keep only some of it: blocks, and modules by
their path.
"""

from collections.abc import Collection

from fleet_protocol.errors import PlanError
from models.layout import Layout, Parameter, Statistic


def in_parts(item: Parameter | Statistic, parts: Collection[str]) -> bool:
    """Whether a parameter, or a norm, of a layout lies in one of some parts.

    These are blocks (``stem``, ``block1`` ..., ``head``), modules (``trunk``, ``hidden.0``) or
    parameters by path.
    """
    return item.block in parts or any(
        item.name == part or item.name.startswith(f"{part}.") for part in parts
    )


def parameters_in(layout: Layout, parts: Collection[str]) -> tuple[str, ...]:
    """Names of the parameters in some parts, in registration order.

    A PlanError where a part has none.
    """
    for part in parts:
        if not any(in_parts(item, (part,)) for item in layout.parameters):
            blocks = dict.fromkeys(item.block for item in layout.parameters)
            modules = dict.fromkeys(item.name.partition(".")[0] for item in layout.parameters)
            raise PlanError(
                f"{layout.arch} has no block and no module {part}; its blocks are {', '.join(sorted(blocks))}, its"
                f" modules {', '.join(modules)}"
            )
    return tuple(item.name for item in layout.parameters if in_parts(item, parts))
