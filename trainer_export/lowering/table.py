"""The lowering of every torch operator, from the modules in `trainer_export.lowering.rules`.

An operator is one function and one row of the table of its module.
"""

from collections.abc import Callable, Mapping
from typing import Any

from fleet_protocol.discovery import discover

Lowering = Callable[..., Any]
"""A function that writes one operator.

It takes the emitter, shape and type of the result, and the operator's arguments.
"""

LOWERINGS: Mapping[Any, Lowering] = discover("trainer_export.lowering.rules", "LOWERINGS")
