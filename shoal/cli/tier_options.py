"""Reads the options of `shoal export` that choose its tiers."""

from dataclasses import dataclass

from models.layout import Layout
from models.tier_grid import TierGrid, tier_grid
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


def read_tiers(layout: Layout, widths: str, depths: str, shares: TierShares) -> TierGrid:
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
    return tier_grid(
        layout,
        parse_floats("--widths", widths),
        chosen,
        parse_shares("--trained", shares.trained),
        windows=shares.windows,
    )
