"""Tiers: the shapes of sub-models, written ``w0.50-d4``, and with a share ``w0.50-d4-t0.25``."""

import re
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property, lru_cache

from fleet_protocol.errors import PlanError

WHOLE_SHARE = 1.0
"""The share of a tier that trains all its parameters; its id does not write it."""

HEAD_SHARE = 0.0
"""The share of a tier that trains its head and no block; ids and settings name it."""

HEAD_NAME = "head"

_ID = re.compile(
    r"w(?P<width>[01]\.\d{2,})-d(?P<depth>[1-9]\d*)"
    r"(-(?P<head>head)|-t(?P<trained>0\.\d{2,})(-p(?P<place>[1-9]\d*))?)?",
    re.ASCII,
)


@dataclass(frozen=True, order=True)
class Tier:
    """A sub-model shape: a share of every width axis, a number of blocks, and what it trains.

    Example:
        >>> Tier(0.5, 4).id
        'w0.50-d4'
        >>> Tier(1.0, 4, 0.5).id, Tier(1.0, 4, HEAD_SHARE).id
        ('w1.00-d4-t0.50', 'w1.00-d4-head')
        >>> Tier.parse("w0.0625-d1")
        Tier(width=0.0625, depth=1, trained=1.0, place=0)

    Attributes:
        width: share of the global width, in (0, 1].
        depth: number of kept blocks from the bottom, at least 1 (1 for a model without a depth
            unit).
        trained: share of these blocks that it trains, from the top and always with the head, in
            [0, 1]; it holds the others as other tiers trained them (`models.shares`).
        place: blocks between those and the head, which it does not train; 0 for a share at the top.
    """

    width: float
    depth: int = 1
    trained: float = WHOLE_SHARE
    place: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.width <= 1.0:
            raise PlanError(
                f"tier width {self.width} is not in (0, 1]; 1 is the whole model, 0.5 half of it"
            )
        if self.depth < 1:
            raise PlanError(f"tier depth {self.depth} is not a positive number of blocks")
        if not 0.0 <= self.trained <= 1.0:
            raise PlanError(
                f"trained share {self.trained} is not in [0, 1]; 1 trains all blocks, 0 only the"
                " head"
            )
        has_window = HEAD_SHARE < self.trained < WHOLE_SHARE
        if self.place < 0 or (self.place and not has_window):
            raise PlanError(
                f"place {self.place} of trained share {self.trained} does not exist: only a share"
                " between 0 and 1 has places, from 0 at the top"
            )

    @property
    def is_assignable(self) -> bool:
        """Return whether devices are assigned to it; plans choose among places below the top."""
        return self.place == 0

    @cached_property
    def id(self) -> str:
        """Return the tier's name in paths and messages.

        Width and share have at least two decimals, and more if necessary.
        """
        shape = f"w{_decimals(self.width)}-d{self.depth}"
        if self.trained == WHOLE_SHARE:
            return shape
        if self.trained == HEAD_SHARE:
            return f"{shape}-{HEAD_NAME}"
        share = f"{shape}-t{_decimals(self.trained)}"
        if self.place:
            return f"{share}-p{self.place}"
        return share

    @classmethod
    @lru_cache(maxsize=256)
    def parse(cls, text: str) -> "Tier":
        """Parse a tier from exactly the form that `id` writes, or raise a PlanError."""
        match = _ID.fullmatch(text)
        if match is not None:
            trained = WHOLE_SHARE
            if match["head"]:
                trained = HEAD_SHARE
            elif match["trained"]:
                trained = float(match["trained"])
            place = int(match["place"] or 0)
            # Round-tripped, so that each tier has one id: paths and plans compare ids.
            tier = cls(
                float(match["width"]),
                int(match["depth"]),
                trained,
                place,
            )
            if tier.id == text:
                return tier
        raise PlanError(
            f"{text!r} is not a tier id; expected a form like w0.50-d4, w0.0625-d1, w1.00-d4-t0.50"
            " or w1.00-d4-head"
        )


def _decimals(number: float) -> str:
    """Write the shortest decimals that read back as the same float, without an exponent."""
    # The shortest text of a float is that of `repr`; `Decimal` writes it without an exponent.
    shortest = Decimal(repr(float(number)))
    whole, _, fraction = f"{shortest:f}".partition(".")
    return f"{whole}.{fraction.ljust(2, '0')}"
