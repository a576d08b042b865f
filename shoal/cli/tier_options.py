"""Reads the options of `shoal export` that choose its tiers."""

from dataclasses import dataclass

from models.layout import Layout
from models.shares import tiers_of_window
from models.tier import Tier
from shoal.cli.options import parse_floats, parse_ints, parse_shares


@dataclass(frozen=True)
class TierShares:
    """The trained shares of every width and depth.

    Attributes:
        trained: the text of ``--trained``.
        windows: whether each share is exported at every place.
    """

    trained: str
    windows: bool

    def tiers(self, layout: Layout, width: float, depth: int | None) -> list[Tier]:
        """Return the tiers of a width and a depth."""
        tiers: list[Tier] = []
        for share in parse_shares("--trained", self.trained):
            tier = layout.tier(width, depth, share)
            if self.windows:
                tiers += tiers_of_window(layout, tier)
            else:
                tiers.append(tier)
        return tiers


def read_tiers(layout: Layout, widths: str, depths: str, shares: TierShares) -> tuple[Tier, ...]:
    """Return each width at each depth, with each trained share.

    Args:
        layout: the model.
        widths: the text of ``--widths``.
        depths: the text of ``--depths``; empty for the full depth.
        shares: the trained shares.

    Raises:
        ConfigError: a text has another form.
        PlanError: the model does not support a tier.
    """
    chosen: tuple[int | None, ...] = (None,)
    if depths:
        chosen = parse_ints("--depths", depths)
    tiers: list[Tier] = []
    for depth in chosen:
        for width in parse_floats("--widths", widths):
            tiers += shares.tiers(layout, width, depth)
    return tuple(tiers)
