"""Axes: named dimensions of a global model, and the number of units that a width keeps.

Widths follow HeteroFL (Diao, Ding, Tarokh: "HeteroFL: Computation and communication efficient
federated learning for heterogeneous clients", ICLR 2021): a sub-model of width ``s`` keeps ``ceil(K
* s)`` of the ``K`` units of a layer.
"""

import math
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Literal

from fleet_protocol.errors import PlanError
from fleet_protocol.foreign_files import Label

_MOST_UNITS = 2**24
"""The most units of an axis; a plan lists the units that a sub-model keeps."""


class AxisKind(str, Enum):
    """Whether a tier's width may cut the axis."""

    WIDTH = "width"
    FIXED = "fixed"


Rounding = Literal["ceil", "floor"]
"""``ceil`` as in the released code of HeteroFL and FedRolex, ``floor`` as in FedRolex's eq. 4."""


def kept_units(
    size: int,
    width: float,
    rounding: Rounding = "ceil",
) -> int:
    """Count the units that a width keeps of one group: ``size * width``, at least one.

    The product is rounded to nine decimals first. Plain ``ceil`` would keep 8 of 100 units at width
    0.07, because ``100 * 0.07`` is 7.000000000000001 in double precision.

    Args:
        size: units of the group in the global model.
        width: share that is kept, in (0, 1].
        rounding: what becomes of a part of a unit.
    """
    units = round(size * width, 9)
    whole = math.ceil(units) if rounding == "ceil" else math.floor(units)
    return max(1, whole)


@dataclass(frozen=True)
class Axis:
    """A named dimension of the global model.

    Example:
        >>> attention = Axis("block1.attention", size=64, groups=4)
        >>> attention.kept(0.25)  # 4 of the 16 dimensions of each head
        16
    """

    name: Label  # unique in the model, such as ``conv2.out``
    size: int  # units in the global model
    kind: AxisKind = AxisKind.WIDTH  # whether a width cuts it
    groups: int = 1  # equal consecutive groups (heads); all are cut alike, none is removed
    # whether its units are not interchangeable, so that only plans that keep leading units may cut
    # it
    leading: bool = False
    rounding: Rounding = "ceil"  # of a part of a unit

    def __post_init__(self) -> None:
        if not self.name:
            raise PlanError("an axis needs a name")
        if not isinstance(self.size, int):
            raise PlanError(
                f"axis {self.name}: {self.size!r} is not a whole number of units; divide with"
                " //, or use int()"
            )
        if self.size > _MOST_UNITS:
            raise PlanError(f"axis {self.name}: no model has more than {_MOST_UNITS:,} units")
        if self.size < 1 or self.groups < 1 or self.size % self.groups:
            raise PlanError(
                f"axis {self.name}: {self.size} units cannot be split into {self.groups} equal "
                "groups; choose a size that is a positive multiple of the groups"
            )

    @property
    def group_size(self) -> int:
        """Units in each group of the global model."""
        return self.size // self.groups

    def kept(self, width: float) -> int:
        """Count the units that a tier of a width in (0, 1] keeps; all of a fixed axis."""
        if self.kind is AxisKind.FIXED:
            return self.size
        return self.groups * kept_units(self.group_size, width, self.rounding)

    def to_json(self) -> dict[str, Any]:
        """Return the axis as a layout's file has it."""
        document = asdict(self)
        # Files that were written before this field existed keep their digests.
        if self.rounding == "ceil":
            del document["rounding"]
        return document
