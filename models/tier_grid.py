"""The tiers of an export: each width at each depth, with each trained share."""

from collections.abc import Sequence
from dataclasses import dataclass

from models.layout import Layout
from models.shares import tiers_of_window, trains_everything
from models.tier import Tier


@dataclass(frozen=True)
class TierGrid:
    """The tiers that widths, depths and trained shares describe.

    Attributes:
        tiers: the tiers that exist.
        omitted: tiers that do not exist, because a sub-model of their depth has so few blocks that
            their share is everything.
    """

    tiers: tuple[Tier, ...]
    omitted: tuple[Tier, ...]

    @property
    def omissions(self) -> tuple[str, ...]:
        """Return a sentence for each omitted tier: why, and which tier trains the same."""
        sentences: list[str] = []
        for tier in self.omitted:
            whole = Tier(tier.width, tier.depth)
            reason = f"{tier.id} was omitted: at this depth, its share is everything"
            if whole in self.tiers:
                sentences.append(f"{reason}, as in {whole.id}")
            else:
                sentences.append(f"{reason}; add the share 1 to export {whole.id}")
        return tuple(sentences)


def tier_grid(
    layout: Layout,
    widths: Sequence[float],
    depths: Sequence[int | None],
    shares: Sequence[float],
    *,
    windows: bool = False,
) -> TierGrid:
    """Return the tiers of all widths, depths and trained shares, depth by depth.

    A share that is everything at one depth is omitted there. If it is everything at all depths, its
    tiers stay, and `models.shares.frozen_parameters` refuses them.

    Args:
        layout: the model.
        widths: widths of the tiers.
        depths: depths of the tiers; None for the full depth.
        shares: trained shares.
        windows: whether each share has a tier at every place of its trained blocks.

    Raises:
        PlanError: the model does not support a tier.
    """
    asked: list[Tier] = []
    for depth in depths:
        for width in widths:
            for share in shares:
                asked.append(layout.tier(width, depth, share))
    everything = [tier for tier in asked if trains_everything(layout, tier)]
    lasting = {tier.trained for tier in asked if tier not in everything}
    tiers: list[Tier] = []
    omitted: list[Tier] = []
    for tier in asked:
        if tier in everything and tier.trained in lasting:
            omitted.append(tier)
        elif windows:
            tiers += tiers_of_window(layout, tier)
        else:
            tiers.append(tier)
    return TierGrid(tuple(tiers), tuple(omitted))
