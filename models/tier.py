"""Tiers: the sub-model shapes a device can be given, written ``w0.50-d4``."""

import re
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property, lru_cache

from fleet_protocol.errors import PlanError

_ID = re.compile(r"w(?P<width>[01]\.\d{2,})-d(?P<depth>[1-9]\d*)", re.ASCII)


@dataclass(frozen=True, order=True)
class Tier:
    """A sub-model shape: a share of every width axis and a number of blocks.

    Example:
        >>> Tier(0.5, 4).id
        'w0.50-d4'
        >>> Tier.parse("w0.0625-d1")
        Tier(width=0.0625, depth=1)

    Attributes:
        width: share of the global width, in (0, 1].
        depth: number of blocks kept from the bottom, at least 1 (1 for a model without a depth
            unit).
    """

    width: float
    depth: int = 1

    def __post_init__(self) -> None:
        if not 0.0 < self.width <= 1.0:
            raise PlanError(
                f"tier width {self.width} is not in (0, 1]; 1 is the whole model, 0.5 half of it"
            )
        if self.depth < 1:
            raise PlanError(f"tier depth {self.depth} is not a positive number of blocks")

    @cached_property
    def id(self) -> str:
        """The tier's name in paths and messages.

        The width has two decimals or as many as it needs.
        """
        # The shortest decimals that read back as the same float, and never with an exponent.
        whole, _, fraction = f"{Decimal(repr(float(self.width))):f}".partition(".")
        return f"w{whole}.{fraction.ljust(2, '0')}-d{self.depth}"

    @classmethod
    @lru_cache(maxsize=256)
    def parse(cls, text: str) -> "Tier":
        """Read a tier back from its id, in exactly the form `id` writes, or raise a PlanError."""
        match = _ID.fullmatch(text)
        if match is not None:
            tier = cls(float(match["width"]), int(match["depth"]))
            if tier.id == text:
                return tier
        raise PlanError(f"{text!r} is not a tier id; expected a form like w0.50-d4 or w0.0625-d1")
