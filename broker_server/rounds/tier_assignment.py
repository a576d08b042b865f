"""Decides which devices can train which tiers, and draws the devices of a round."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from broker_server.rounds.artifacts import TierArtifacts
from broker_server.settings.assignment import assign_dynamic, assign_fix, parse_mix
from broker_server.settings.fleet import TiersConfig
from fleet_protocol.errors import ConfigError, PlanError
from fleet_protocol.messages import Profile
from models.tier import Tier

_WIDTH_SLACK = 1e-9  # a device may write 0.3333 for a third
_FULL_WIDTH = 1.0


@dataclass(frozen=True)
class Assignment:
    """A device with the tier it trains."""

    device: str
    tier: TierArtifacts


def usable_tiers(tiers: Sequence[Tier], config: TiersConfig) -> tuple[Tier, ...]:
    """Return the tiers that a configuration allows, in their order.

    Raises:
        ConfigError: it names a tier that is not exported.
    """
    if config.allowed is None:
        return tuple(tiers)
    names = [tier.id for tier in tiers]
    for name in config.allowed:
        if name not in names:
            raise ConfigError(
                f"tiers.allowed: no tier {name!r} is exported; there are {', '.join(names)}"
            )
    return tuple(tier for tier in tiers if tier.id in config.allowed)


def require_levels(tiers: Sequence[Tier], config: TiersConfig) -> None:
    """Check that there is a tier for every level.

    Raises:
        PlanError: a level that devices can be given has no tier of its width.
    """
    if config.levels is None:
        return
    mix = parse_mix(config.levels)
    for level in mix.levels:
        width = mix.width(level.rate)
        exported = any(abs(tier.width - width) <= _WIDTH_SLACK for tier in tiers)
        if level.weight and not exported:
            raise PlanError(
                f"tiers.levels: level {level.name} is width {width:g} of the global model, but the"
                f" tiers in use are {', '.join(tier.id for tier in tiers)}; export that width or"
                " change the levels"
            )


# Which device can train which tier.


def fits(profile: Profile, tier: TierArtifacts, memory_share: float) -> bool:
    """Return whether a device declares itself able to train a tier.

    Args:
        profile: of the device.
        tier: the artifact set.
        memory_share: share of the free memory that training may take. A free memory of 0 is one
            that the device could not measure.
    """
    manifest = tier.manifest
    if manifest.width > profile.max_width + _WIDTH_SLACK:
        return False
    if profile.max_depth is not None and manifest.depth > profile.max_depth:
        return False
    memory = manifest.peak_memory_bytes
    if profile.free_ram_bytes and memory > memory_share * profile.free_ram_bytes:
        return False
    return profile.memory_below is None or memory < profile.memory_below


def _fitting_tiers(
    profile: Profile, tiers: Sequence[TierArtifacts], memory_share: float
) -> list[TierArtifacts]:
    fitting = []
    for tier in tiers:
        if fits(profile, tier, memory_share):
            fitting.append(tier)
    return fitting


def why_unfit(profile: Profile, tiers: Sequence[TierArtifacts], config: TiersConfig) -> str:
    """Return why a device cannot take part in a run, with what to do; empty where it can."""
    if profile.unable:
        return profile.unable
    if not profile.backends:
        return "it has no runtime to train with; install shoal[device] on it"
    if profile.examples == 0:
        return "it has no training samples; look at [data] of its device.toml"
    if config.exclude_smaller:
        tiers = tiers[:1]
    if _fitting_tiers(profile, tiers, config.memory_share):
        return ""
    if profile.lowered:
        return profile.lowered
    least = min(tiers, key=lambda tier: tier.manifest.peak_memory_bytes)
    depth = "" if profile.max_depth is None else f", max_depth {profile.max_depth}"
    return (
        f"none of the tiers {tier_names(tiers)} fits it: it has max_width"
        f" {profile.max_width:g}{depth}"
        f" and {profile.free_ram_bytes} bytes of free memory, of which {config.memory_share:.0%}"
        f" may be used; {least.tier.id} needs {least.manifest.peak_memory_bytes} bytes"
    )


def assign(
    profiles: Mapping[str, Profile],
    tiers: Sequence[TierArtifacts],
    config: TiersConfig,
    *,
    seed: int = 0,
    version: int = 0,
) -> dict[str, Assignment]:
    """Assign every device the largest tier it is able to train, but none above its level.

    Args:
        profiles: of the devices, by id in order.
        tiers: those in use, largest first.
        config: how levels are dealt. Fixed ones go by the order of the devices' ids, so they stay
            the same all run long where the same devices are online; others are drawn for every
            version.
        seed: of the run.
        version: number of the version that the round starts from.

    Returns:
        The devices that can take part, by id; those without data or too small for every tier are
        left out.
    """
    fitting: dict[str, list[TierArtifacts]] = {}
    for device, profile in profiles.items():
        if not why_unfit(profile, tiers, config):
            fitting[device] = _fitting_tiers(profile, tiers, config.memory_share)
    widths = _level_widths(sorted(fitting), config, seed, version)
    assignments: dict[str, Assignment] = {}
    for device, device_tiers in fitting.items():
        tier = _largest_within(device_tiers, widths.get(device, _FULL_WIDTH))
        assignments[device] = Assignment(device, tier)
    return assignments


def _largest_within(tiers: Sequence[TierArtifacts], width: float) -> TierArtifacts:
    """Return the largest tier up to a width; a board too small for its level gets its smallest."""
    for tier in tiers:
        if tier.tier.width <= width + _WIDTH_SLACK:
            return tier
    return tiers[-1]


def _level_widths(
    devices: Sequence[str], config: TiersConfig, seed: int, version: int
) -> dict[str, float]:
    """Return the width of every device's level; nothing where there are no levels."""
    if config.levels is None or not devices:
        return {}
    mix = parse_mix(config.levels)
    if config.assign == "fix":
        rates = assign_fix(mix, len(devices))
    else:
        rates = assign_dynamic(mix, len(devices), seed=seed, round_index=version)
    widths = {}
    for device, rate in zip(devices, rates, strict=True):
        widths[device] = mix.width(rate)
    return widths


# The devices of a round.


def count_wanted(eligible: int, *, fraction: float, least: int) -> int:
    """Return how many updates a round wants: a share of the eligible devices, rounded up.

    It is at least `least`, as far as there are so many devices.
    """
    return min(eligible, max(least, _share_of(fraction, eligible)))


def choose(
    eligible: Mapping[str, Assignment],
    *,
    wanted: int,
    over_selection: float = 0.0,
    seed: int,
    number: int,
) -> tuple[Assignment, ...]:
    """Draw the devices of a round without replacement (specification 1.2, step 1).

    The draw is a function of the arguments.

    Args:
        eligible: by device.
        wanted: updates that the round wants.
        over_selection: how many more devices are asked, as a share of the wanted ones, rounded up.
        seed: of the run.
        number: of the round.

    Returns:
        The chosen devices, by id.
    """
    count = min(len(eligible), wanted + _share_of(over_selection, wanted))
    draw = random.Random(f"{seed}/{number}")  # noqa: S311  (a reproducible draw, not a secret)
    devices = sorted(draw.sample(sorted(eligible), count))
    return tuple(eligible[device] for device in devices)


def _share_of(share: float, count: int) -> int:
    # Rounded first: 0.07 * 100 is a little more than 7, and must not become 8.
    return math.ceil(round(share * count, 9))


def tier_names(tiers: Sequence[TierArtifacts]) -> str:
    """Return the ids of tiers for a message."""
    return ", ".join(tier.tier.id for tier in tiers)
