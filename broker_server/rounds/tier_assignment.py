"""Decides which devices can train which tiers."""

import math
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
    """A device with the tier it trains, and the bytes of memory that training may take there."""

    device: str
    tier: TierArtifacts
    memory: float = math.inf


def usable_tiers(tiers: Sequence[Tier], config: TiersConfig) -> tuple[Tier, ...]:
    """Return the tiers that a configuration allows, in their order.

    By default they are all with their trained blocks at the top: plans choose other places.

    Raises:
        ConfigError: it names a tier that is not exported.
    """
    if config.allowed is None:
        return tuple(tier for tier in tiers if tier.is_assignable)
    names = [tier.id for tier in tiers]
    for name in config.allowed:
        if name not in names:
            raise ConfigError(
                f"tiers.allowed: no tier {name!r} is exported; there are {', '.join(names)}"
            )
    return tuple(tier for tier in tiers if tier.id in config.allowed)


def require_levels(tiers: Sequence[Tier], config: TiersConfig) -> None:
    """Check that every level has a tier.

    Raises:
        PlanError: a level that devices can be given has no tier of its width.
    """
    if config.levels is None:
        return
    mix = parse_mix(config.levels)
    for level in mix.levels:
        # `allowed` may name widths with rounded decimals.
        width = mix.width(level.rate)
        exported = any(abs(tier.width - width) <= _WIDTH_SLACK for tier in tiers)
        # A level without devices needs no tier.
        if level.weight and not exported:
            raise PlanError(
                f"tiers.levels: level {level.name} is width {width:g} of the global model, but the"
                f" tiers in use are {', '.join(tier.id for tier in tiers)}; export that width or"
                " change the levels"
            )


# Which device can train which tier.


def training_memory(profile: Profile, memory_share: float) -> float:
    """Return the bytes that training may take on a device.

    Args:
        profile: profile of the device.
        memory_share: share of the free memory that training may take. A free memory of 0 means that
            the device could not measure it.
    """
    memory = math.inf
    if profile.free_ram_bytes:
        memory = memory_share * profile.free_ram_bytes
    if profile.memory_below is not None:
        memory = min(memory, profile.memory_below - 1)
    return memory


def fits(profile: Profile, tier: TierArtifacts, memory_share: float) -> bool:
    """Return whether a device's profile allows it to train a tier.

    Args:
        profile: profile of the device.
        tier: the artifact set.
        memory_share: see `training_memory`.
    """
    manifest = tier.manifest
    if manifest.width > profile.max_width + _WIDTH_SLACK:
        return False
    if profile.max_depth is not None and manifest.depth > profile.max_depth:
        return False
    return tier.memory_bytes <= training_memory(profile, memory_share)


def _fitting_tiers(
    profile: Profile, tiers: Sequence[TierArtifacts], memory_share: float
) -> list[TierArtifacts]:
    fitting = []
    for tier in tiers:
        if fits(profile, tier, memory_share):
            fitting.append(tier)
    return fitting


def why_unfit(profile: Profile, tiers: Sequence[TierArtifacts], config: TiersConfig) -> str:
    """Return why a device cannot take part in a run, with what to do; empty if it can."""
    if profile.unable:
        return profile.unable
    if not profile.backends:
        return "it has no runtime to train with; install shoal[device] on it"
    if profile.examples == 0:
        return "it has no training samples; check [data] in its device.toml"
    if config.exclude_smaller:
        # The first is the whole model: tiers come largest first.
        tiers = tiers[:1]
    if _fitting_tiers(profile, tiers, config.memory_share):
        return ""
    # The board itself has lowered its limits, and says why.
    if profile.lowered:
        return profile.lowered
    least = min(tiers, key=lambda tier: tier.memory_bytes)
    depth = "" if profile.max_depth is None else f", max_depth {profile.max_depth}"
    return (
        f"none of the tiers {tier_names(tiers)} fits it: it has max_width "
        f"{profile.max_width:g}{depth} and {profile.free_ram_bytes} bytes of free memory, of "
        f"which {config.memory_share:.0%} may be used; {least.tier.id} needs "
        f"{least.memory_bytes} bytes"
    )


def assign(
    profiles: Mapping[str, Profile],
    tiers: Sequence[TierArtifacts],
    config: TiersConfig,
    *,
    seed: int = 0,
    version: int = 0,
) -> dict[str, Assignment]:
    """Assign to every device the largest tier that it can train, but none above its level.

    Args:
        profiles: profiles of the devices, by id in order.
        tiers: those in use, largest first.
        config: how levels are dealt. Fixed levels follow the order of the devices' ids, so they
            stay the same throughout the run if the same devices are online; other levels are drawn
            for every version.
        seed: seed of the run.
        version: number of the version from which the round starts.

    Returns:
        The devices that can take part, by id; those without data or too small for every tier are
        left out.
    """
    fitting: dict[str, list[TierArtifacts]] = {}
    for device, profile in profiles.items():
        if not why_unfit(profile, tiers, config):
            fitting[device] = _fitting_tiers(profile, tiers, config.memory_share)
    # In the order of ids, so that fixed levels stay with their devices.
    widths = _level_widths(sorted(fitting), config, seed, version)
    assignments: dict[str, Assignment] = {}
    for device, device_tiers in fitting.items():
        tier = _largest_within(device_tiers, widths.get(device, _FULL_WIDTH))
        memory = training_memory(profiles[device], config.memory_share)
        assignments[device] = Assignment(device, tier, memory)
    return assignments


def _largest_within(tiers: Sequence[TierArtifacts], width: float) -> TierArtifacts:
    """Return the largest tier up to a width; if no tier is so narrow, return the smallest."""
    for tier in tiers:
        if tier.tier.width <= width + _WIDTH_SLACK:
            return tier
    return tiers[-1]


def _level_widths(
    devices: Sequence[str], config: TiersConfig, seed: int, version: int
) -> dict[str, float]:
    """Return the width of every device's level; empty without levels."""
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


def tier_names(tiers: Sequence[TierArtifacts]) -> str:
    """Return the ids of tiers for a message."""
    return ", ".join(tier.tier.id for tier in tiers)
