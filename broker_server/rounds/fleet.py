"""The devices of a fleet: who is there, what each can train, and who is asked in a round."""

import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from broker_server.rounds.artifacts import TierArtifacts
from broker_server.settings.assignment import assign_dynamic, assign_fix, parse_mix
from broker_server.settings.fleet import TiersConfig
from broker_server.store import DeviceRecord
from broker_server.store.remedies import REVOKED
from fleet_protocol.errors import ConfigError, PlanError
from fleet_protocol.messages import DeviceProfile, DeviceStatus, Profile

_WIDTH_SLACK = 1e-9  # a device may write 0.3333 for a third


@dataclass(frozen=True)
class Assignment:
    """A device with the tier it is given."""

    device: str
    tier: TierArtifacts


class Fleet:
    """Presence as last heard.

    Known devices count as offline until the broker's retained messages say otherwise.

    Attributes:
        declined: devices whose data is of no use in the run in progress, and why, until they come
            anew or it changes.
    """

    def __init__(self, known: Iterable[DeviceRecord] = ()) -> None:
        self._profiles: dict[str, Profile | None] = {
            device.id: None if device.state == REVOKED else device.profile for device in known
        }
        self._online: set[str] = set()
        self._silent: set[str] = set()
        self._dismissed: set[str] = set()
        self.declined: dict[str, str] = {}

    def receive(self, said: DeviceStatus | DeviceProfile) -> bool:
        """Take what a device says of itself; True if it came or went."""
        device = said.device
        before = self.is_online(said.device)
        self._silent.discard(device)
        if isinstance(said, DeviceProfile):
            if said.profile.examples != self.announced_examples(device):
                self.declined.pop(device, None)
            self._profiles[device] = said.profile
        else:
            self._profiles.setdefault(device)
            (self._online.add if said.online else self._online.discard)(device)
            if not said.online:
                self.declined.pop(device, None)
        return before != self.is_online(device)

    def mark_silent(self, device: str) -> None:
        """Count a device as away, whatever the broker says, until its next word."""
        self._silent.add(device)

    def mark_active(self, device: str) -> None:
        """Take a word of a device, whatever it is about."""
        self._silent.discard(device)

    def limit_to_members(self, members: Collection[str]) -> list[str]:
        """Count those as away who are no members now, until they are again, as after an hour of a
        wrong clock.

        Ids of those of whom something was known, and who are no members any more, or are again.
        """
        said = {
            device
            for device, profile in self._profiles.items()
            if profile is not None or device in self._online
        }
        before = self._dismissed
        self._dismissed = said - {*members}
        return sorted(before ^ self._dismissed)

    def knows(self, device: str) -> bool:
        """Whether the device ever announced itself."""
        return device in self._profiles

    def is_online(self, device: str) -> bool:
        """Whether the device is connected, as far as we know, and not silent."""
        return (
            device in self._online and device not in self._silent and device not in self._dismissed
        )

    def announced_examples(self, device: str) -> int | None:
        """Samples that a device last said it has, None if it never did."""
        profile = self._profiles.get(device)
        return None if profile is None else profile.examples

    def findings(self, device: str) -> tuple[str, ...]:
        """The data findings that a device last reported."""
        profile = self._profiles.get(device)
        return () if profile is None or profile.findings is None else profile.findings

    def labels_digest(self, device: str) -> str | None:
        """What a device last said of the order of its own labels; None where it names none."""
        profile = self._profiles.get(device)
        return None if profile is None else profile.labels_digest

    @property
    def known(self) -> frozenset[str]:
        """Ids of all devices that ever announced themselves."""
        return frozenset(self._profiles)

    @property
    def online(self) -> tuple[str, ...]:
        """Ids of the connected devices that are not silent, sorted."""
        return tuple(sorted(self._online - self._silent - self._dismissed))

    def releases(self, *, sets: bool = False) -> dict[str, str]:
        """What the devices that take releases say of theirs, by id."""
        there = self._profiles.keys() - self._dismissed
        known = {
            device: profile for device in there if (profile := self._profiles[device]) is not None
        }
        found = {
            device: profile.sets if sets else profile.release for device, profile in known.items()
        }
        return {device: said for device, said in found.items() if said is not None}

    def profiles(self) -> dict[str, Profile]:
        """Profiles of the devices that may be asked and sent one, by id in order."""
        found = {
            device: self._profiles[device] for device in self.online if device not in self.declined
        }
        return {device: profile for device, profile in found.items() if profile is not None}

    def why_away(self, device: str) -> str:
        """Why a device without one of `profiles` is not asked."""
        if device in self._online & self._silent:
            return "connected, and says nothing: it is asked again after its next word"
        return self.declined.get(device, "offline")


def usable_tiers(
    tiers: Mapping[str, TierArtifacts], config: TiersConfig
) -> tuple[TierArtifacts, ...]:
    """The tiers a configuration allows, largest first.

    A ConfigError where it names a tier that is not exported.
    """
    if config.allowed is None:
        return tuple(tiers.values())
    unknown = [tier for tier in config.allowed if tier not in tiers]
    if unknown:
        raise ConfigError(
            f"tiers.allowed: no tier {unknown[0]!r} is exported; there are {', '.join(tiers)}"
        )
    return tuple(item for key, item in tiers.items() if key in config.allowed)


def fits(profile: Profile, tier: TierArtifacts, memory_share: float) -> bool:
    """Whether a device declares itself able to train a tier.

    A free memory of 0 is one that it could not measure.
    """
    manifest = tier.manifest
    return (
        manifest.width <= profile.max_width + _WIDTH_SLACK
        and (profile.max_depth is None or manifest.depth <= profile.max_depth)
        and (
            not profile.free_ram_bytes
            or manifest.peak_memory_bytes <= memory_share * profile.free_ram_bytes
        )
        and (profile.memory_below is None or manifest.peak_memory_bytes < profile.memory_below)
    )


def why_unfit(profile: Profile, tiers: Sequence[TierArtifacts], config: TiersConfig) -> str:
    """Why a device cannot take part in a run, with what to do; empty where it can."""
    if profile.unable:
        return profile.unable
    if not profile.backends:
        return "it has no runtime to train with; install shoal[device] on it"
    if profile.examples == 0:
        return "it has no training samples; look at [data] of its device.toml"
    if config.exclude_smaller:
        tiers = tiers[:1]
    if any(fits(profile, tier, config.memory_share) for tier in tiers):
        return ""
    least = min(tiers, key=lambda tier: tier.manifest.peak_memory_bytes)
    depth = "" if profile.max_depth is None else f", max_depth {profile.max_depth}"
    return profile.lowered or (
        f"none of the tiers {', '.join(tier.tier.id for tier in tiers)} fits it: it has max_width"
        f" {profile.max_width:g}{depth} and {profile.free_ram_bytes} bytes of free memory, of which"
        f" {config.memory_share:.0%} may be used; {least.tier.id} needs {least.manifest.peak_memory_bytes} bytes"
    )


def assign(
    profiles: Mapping[str, Profile],
    tiers: Sequence[TierArtifacts],
    config: TiersConfig,
    *,
    seed: int = 0,
    version: int = 0,
) -> dict[str, Assignment]:
    """Give every device the largest tier it declares itself able to train, or one of its level if
    that is smaller.

    Tiers are those in use, largest first. Fixed levels go by the order of the devices' ids, so they
    are the same all run long where the same devices are there; others are drawn anew for every
    version.

    Returns:
        Devices that can take part, by id; those without data or too small for every tier are left
        out.
    """
    able: dict[str, list[TierArtifacts]] = {}
    for device, profile in profiles.items():
        if not why_unfit(profile, tiers, config):
            able[device] = [tier for tier in tiers if fits(profile, tier, config.memory_share)]
    limits = _limits(sorted(able), config, seed, version)
    chosen: dict[str, Assignment] = {}
    for device, fitting in able.items():
        # A board too small for its level takes what it can.
        within = [
            tier for tier in fitting if tier.tier.width <= limits.get(device, 1.0) + _WIDTH_SLACK
        ]
        chosen[device] = Assignment(device, (within or fitting[-1:])[0])
    return chosen


def _limits(
    devices: Sequence[str], config: TiersConfig, seed: int, version: int
) -> dict[str, float]:
    """The width of every device's level; nothing where there are no levels."""
    if config.levels is None or not devices:
        return {}
    mix = parse_mix(config.levels)
    rates = (
        assign_fix(mix, len(devices))
        if config.assign == "fix"
        else assign_dynamic(mix, len(devices), seed=seed, round_index=version)
    )
    return {device: mix.width(rate) for device, rate in zip(devices, rates, strict=True)}


def require_levels(tiers: Sequence[TierArtifacts], config: TiersConfig) -> None:
    """See that there is a tier for every level.

    Raises:
        PlanError: a level that devices can be given has no tier of its width.
    """
    if config.levels is None:
        return
    mix = parse_mix(config.levels)
    for level in mix.levels:
        width = mix.width(level.rate)
        if level.weight and not any(abs(item.tier.width - width) <= _WIDTH_SLACK for item in tiers):
            raise PlanError(
                f"tiers.levels: level {level.name} is width {width:g} of the global model, but the tiers in use are"
                f" {', '.join(item.tier.id for item in tiers)}; export that width or change the levels"
            )


def count_wanted(eligible: int, *, fraction: float, least: int) -> int:
    """How many updates a round wants: a share of the eligible devices, rounded up, but at least so
    many.
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
    """Draw the devices of a round, by id, without replacement (specification 1.2, step 1), by the
    arguments alone.

    As many as are wanted, and beyond them `over_selection`, a share of these, rounded up.
    """
    count = min(len(eligible), wanted + _share_of(over_selection, wanted))
    draw = random.Random(f"{seed}/{number}")  # noqa: S311  (a reproducible draw, not a secret)
    return tuple(eligible[device] for device in sorted(draw.sample(sorted(eligible), count)))


def _share_of(share: float, count: int) -> int:
    return math.ceil(round(share * count, 9))
