"""Computes bounds on norms and samples from a round's updates, and a verdict on each update.

`broker_server.updates.screens` calls `screen` and applies the verdicts.

One device must not dominate the model. An update is measured by the Euclidean norm of its
difference from the weights that were sent to its device, and bounded by a multiple of the median of
its tier, so no bound has to be guessed: only more than half of the devices can move a median (norm
bounding: Sun, Kairouz, Suresh, McMahan, 2019, "Can You Really Backdoor Federated Learning?",
https://arxiv.org/abs/1911.07963, section 4). Norms of the previous round are included, and of
earlier rounds if a tier has too few.

If fewer than three devices of a tier have sent updates, these devices themselves would determine
its median. Such a tier is compared with all tiers, by the mean square of an entry. Its bound never
falls below an earlier one of the same run: if the others have settled, a device that moves as it
always did is not worse than before. So such a device can go as far as the fleet once allowed, in
every round, and no further.

Everything here is a function of the contents of the store and the disk: a restarted server gets the
same result.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from broker_server.stages.screening import Screening
from broker_server.strategies.registry import STRATEGIES
from broker_server.strategies.stage import Settings, Stage, StageDefault, stated
from broker_server.strategies.traits import Trait
from fleet_protocol.errors import RefusalReason

COLOSSAL = 1e30
"""Updates with larger norms are refused in any case: a sum of such updates may overflow."""

PEERS = 3  # devices, and norms, that a tier needs for its own median


def _counts_alike(run: Settings) -> bool:
    """Return whether every update must count alike, by the configuration or by the method."""
    method = STRATEGIES.get(run.strategy.name)
    # A method with equal weights by definition counts alike, too.
    return run.strategy.weighting == "uniform" or (method is not None and method.alike)


# Both compare an update with the others of its round: single updates must be visible, and the
# weight of one depends on the others.
STAGES = stated(
    Stage(
        name="robust.norm_bound",
        remedy="set robust.norm_bound = 0",
        setting="robust.norm_bound",
        wanted=lambda run: run.robust.norm_factor > 0,
        needs=frozenset({Trait.SINGLE}),
        breaks=frozenset({Trait.INDEPENDENT}),
        default=StageDefault(
            off=0.0,
            asked_by=frozenset({"norm_bound", "beyond_norm"}),
            gives_way=_counts_alike,
        ),
    ),
    Stage(
        name='robust.beyond_weight = "refuse"',
        remedy='set robust.beyond_weight = "clip"',
        setting="robust.beyond_weight",
        wanted=lambda run: run.robust.beyond_weight == "refuse",
        needs=frozenset({Trait.SINGLE}),
        breaks=frozenset({Trait.INDEPENDENT}),
    ),
)


class Bounds(Protocol):
    """The bounds of ``[robust]``, which `broker_server.settings.robust` explains."""

    @property
    def norm_factor(self) -> float:
        """Return the factor of the median norm; 0 for no bound."""

    @property
    def bounded_devices(self) -> int:
        """Return how many devices of a tier must have sent updates for its bound to apply."""

    @property
    def beyond_norm(self) -> str:
        """Return the treatment of updates beyond the bound: ``refuse`` or ``clip``."""

    @property
    def weight_bound(self) -> float:
        """Return the factor of the median number of samples; 0 for no bound."""

    @property
    def beyond_weight(self) -> str:
        """Return the treatment of updates beyond the bound: ``refuse`` or ``clip``."""


@dataclass(frozen=True)
class EarlierNorms:
    """Norms of a tier from earlier rounds of a run.

    Attributes:
        norms: norms of updates that counted, as they counted.
        devices: devices that sent them.
        bound: the largest that was applied; None if none was.
    """

    norms: Sequence[float] = ()
    devices: frozenset[str] = frozenset()
    bound: float | None = None


@dataclass(frozen=True)
class Measured:
    """The measurements that screens compare.

    Attributes:
        tier: tier of the update.
        norm: norm of its difference from the weights that were sent to its device.
        values: number of its entries.
        declared: samples that the device reports it trained on.
        announced: samples that the device announced before; None if it has not.
        device: the sender.
    """

    tier: str
    norm: float
    values: int
    declared: int
    announced: int | None = None
    device: str = ""

    @property
    def samples(self) -> int:
        """Return the number of samples with which it may count: never more than were announced."""
        return self.declared if self.announced is None else min(self.declared, self.announced)


@dataclass(frozen=True)
class Verdict:
    """How an update counts; if it is refused, with the reason for programs and for people."""

    screening: Screening
    reason: RefusalReason | None = None
    detail: str = ""


def lower_median(values: Iterable[float]) -> float:
    """Return the middle value; of an even number, the smaller of the two in the middle.

    For two values it is the one that a bad device cannot raise.
    """
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def screen(
    updates: Mapping[str, Measured],
    earlier: Mapping[str, EarlierNorms],
    config: Bounds,
) -> dict[str, Verdict]:
    """Compare the updates of a round with the bounds; nothing is changed here.

    Args:
        updates: their measurements, by task.
        earlier: norms of earlier rounds, by tier.
        config: the bounds.

    Returns:
        A verdict for each task.
    """
    # Bounds of tiers come first, because they need all updates together.
    bounds = _norm_bounds(list(updates.values()), earlier, config)
    most = math.inf
    if updates and config.weight_bound:
        middle = lower_median(update.samples for update in updates.values())
        # At least one sample, so that a bound never excludes every device.
        most = max(1, math.floor(config.weight_bound * middle))
    verdicts = {}
    for task, update in updates.items():
        samples = int(min(update.samples, most))
        verdicts[task] = _verdict(update, bounds[update.tier], samples, config)
    return verdicts


def usual_bounds(earlier: Mapping[str, EarlierNorms], config: Bounds) -> dict[str, float]:
    """Return the largest norm of every tier, as far as earlier rounds determine it.

    A tier in which too few devices have sent updates has the largest of its earlier bounds.

    Args:
        earlier: norms of earlier rounds, by tier.
        config: the bounds.
    """
    bounds = {}
    for tier, before in earlier.items():
        # Too few devices: nothing is expected of the tier, as `screen` bounds nothing there.
        if len(before.devices) < config.bounded_devices:
            continue
        if len(before.devices) >= PEERS:
            bounds[tier] = config.norm_factor * lower_median(before.norms)
        # The tier has no median, so the bound that was applied before holds.
        elif before.bound is not None:
            bounds[tier] = before.bound
    return bounds


def _norm_bounds(
    updates: Sequence[Measured], earlier: Mapping[str, EarlierNorms], config: Bounds
) -> dict[str, float | None]:
    """Return the largest norm of every tier; None for no limit."""
    factor = config.norm_factor
    if not factor:
        # No factor, no bounds.
        return dict.fromkeys(update.tier for update in updates)
    # The root of the mean square of an entry makes updates of different sizes comparable.
    roots = []
    by_tier: dict[str, list[Measured]] = {}
    for update in updates:
        by_tier.setdefault(update.tier, []).append(update)
        if update.values:
            roots.append(update.norm / math.sqrt(update.values))
    bounds: dict[str, float | None] = {}
    for tier, own in by_tier.items():
        before = earlier.get(tier, EarlierNorms())
        # Devices of earlier rounds count, so a tier is bounded although few of them answered now.
        devices = before.devices.union(update.device for update in own)
        if len(devices) < config.bounded_devices:
            bounds[tier] = None
            continue
        usual = _usual_norm(roots, own[0].values)
        # If most have changed nothing, there is nothing to compare with.
        bounds[tier] = _tier_bound(own, before, len(devices), usual, factor) or None
    return bounds


def _tier_bound(
    own: Sequence[Measured], before: EarlierNorms, devices: int, usual: float, factor: float
) -> float:
    """Return the largest norm of a tier; 0 where there is nothing to compare with.

    Args:
        own: the updates of the tier.
        before: what is known of its earlier rounds.
        devices: how many have sent updates of the tier, in this round or before.
        usual: the norm that updates of its size have in the fleet.
        factor: factor of the median.
    """
    if devices < PEERS:
        # The bound never falls below an earlier one; see the module's text.
        return max(factor * usual, before.bound or 0.0)
    middle = lower_median([*(update.norm for update in own), *before.norms])
    # Otherwise one of two devices that does nothing would exclude the other.
    return factor * (middle if len(own) >= PEERS else max(middle, usual))


def _usual_norm(roots: Sequence[float], values: int) -> float:
    """Return the typical norm of updates with a number of entries; 0 if there is only one."""
    # An update cannot be typical of itself.
    if len(roots) < 2:
        return 0.0
    return lower_median(roots) * math.sqrt(values)


def _verdict(
    update: Measured,
    bound: float | None,
    samples: int,
    config: Bounds,
) -> Verdict:
    # Even without a bound, because sums of such updates may overflow.
    colossal = update.norm > COLOSSAL
    clips = config.beyond_norm == "clip" and not colossal
    too_far = False
    scale = 1.0
    if bound is not None and update.norm > bound:
        too_far = True
        # Clipping keeps the direction, and shortens the change to the bound.
        scale = bound / update.norm
    screening = Screening(
        norm=update.norm,
        bound=bound,
        scale=scale if clips else 1.0,
        samples=samples,
        declared=update.declared,
    )
    # A colossal update is refused, even where others are clipped.
    if colossal or (too_far and not clips):
        allowed = f"{COLOSSAL:g}" if bound is None else f"{bound:.4g}"
        return Verdict(
            screening,
            RefusalReason.TOO_FAR,
            f"it differs by {update.norm:.4g} from the weights sent; tier {update.tier} "
            f"allows up to {allowed}",
        )
    # An update without samples has no weight.
    if not samples or (samples < update.declared and config.beyond_weight == "refuse"):
        announced = "" if update.announced is None else f" ({update.announced} announced)"
        return Verdict(
            screening,
            RefusalReason.TOO_HEAVY,
            f"it claims {update.declared} samples{announced}; up to {samples} are accepted",
        )
    return Verdict(screening)
