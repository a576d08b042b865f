"""The tiers of a new artifact set: those requested, and those kept from the published set."""

import contextlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fleet_protocol.errors import ConfigError, PlanError, ShoalError
from models.layout import Layout
from models.shares import frozen_parameters
from models.tier import Tier

UnaskedTiers = Literal["refuse", "add", "replace"]
"""Treatment of published tiers that are not requested: raise an error, keep or remove them."""


@dataclass(frozen=True)
class TierSelection:
    """The tiers of a new set.

    Attributes:
        tiers: all tiers; those kept from the published set come last.
        heads: number of labels of each tier with its own head.
        published: tiers of the published set, kept or not.
    """

    tiers: Sequence[Tier]
    heads: Mapping[Tier, int]
    published: Container[Tier]


def refuse_uncut_tiers(layout: Layout, tiers: Sequence[Tier]) -> None:
    """Refuse tiers that the model does not support, and narrow ones if widths cut nothing."""
    # Check all tiers first, because an unsupported tier is the more useful error.
    whole = {}
    for tier in tiers:
        frozen_parameters(layout, tier)
        whole[tier] = _shapes(layout, layout.tier(1.0, tier.depth))
    narrow = []
    for tier in tiers:
        if tier.width < 1:
            narrow.append(tier)
    if narrow and all(_shapes(layout, tier) == whole[tier] for tier in narrow):
        raise ConfigError(
            f"{layout.arch}: the parameters of {_ids(narrow)} are as large as those of the whole"
            " model, so the width has no effect; take the sizes to reduce from"
            " cut.width(name, size), or export only width 1"
        )


def _ids(tiers: Sequence[Tier]) -> str:
    return ", ".join(tier.id for tier in tiers)


def _shapes(layout: Layout, tier: Tier) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a tier's tensors, including those of the base."""
    return {**layout.shapes(tier), **layout.base_of(tier)}


def select_tiers(
    published: Path,
    wanted: Sequence[Tier],
    heads: Mapping[Tier, int],
    unasked: UnaskedTiers,
) -> TierSelection:
    """Join the requested tiers with the kept tiers of the published set.

    Args:
        published: folder of the published set; it may be missing.
        wanted: the requested tiers.
        heads: number of labels of each requested tier with its own head.
        unasked: what to do with published tiers that are not requested.

    Raises:
        ConfigError: tiers would be removed, or a head belongs to a tier that is not exported.
    """
    earlier = _published_tiers(published)
    unwanted = []
    for tier in earlier:
        if tier not in wanted:
            unwanted.append(tier)
    if unwanted and unasked == "refuse":
        raise ConfigError(
            f"{published.name} in {published.parent} also has {_ids(unwanted)}, which a fleet"
            " may be using; --add keeps them, --replace removes them"
        )
    tiers = list(wanted)
    own_heads = dict(heads)
    if unasked == "add":
        tiers += unwanted
        for tier in unwanted:
            classes = earlier[tier]
            if classes is not None:
                own_heads[tier] = classes
    for tier in own_heads:
        if tier not in tiers:
            raise ConfigError(
                f"{published.name}: a head is requested for tier {tier.id}, which is not"
                " exported; add the tier or drop its head"
            )
    return TierSelection(tiers, own_heads, earlier)


def _published_tiers(folder: Path) -> dict[Tier, int | None]:
    """Return the tiers of a set, each with its number of labels if it has its own head."""
    try:
        heads = Layout.from_json((folder / "layout.json").read_bytes()).heads
    # A set that was removed by half, or of another version, has no heads to keep.
    except (OSError, ShoalError):
        heads = {}
    tiers: dict[Tier, int | None] = {}
    for path in sorted(folder.glob("*/manifest.json")):
        name = path.parent.name
        with contextlib.suppress(PlanError):  # other folders are ignored
            tiers[Tier.parse(name)] = heads.get(name)
    return tiers


def with_heads(layout: Layout, heads: Mapping[Tier, int]) -> Layout:
    """Return the layout with the numbers of labels of tiers that have their own head."""
    if not heads:
        return layout
    classes_by_tier = {}
    for tier, classes in heads.items():
        classes_by_tier[tier.id] = classes
    return replace(layout, heads=classes_by_tier)
