"""Which updates of a round count, and with what weight: bounds taken from the updates themselves.

One device must not own the model. An update is measured by the Euclidean norm of its difference to
the weights that its device was sent, and bounded by a multiple of the median of its tier, so no
bound has to be guessed: a median is moved by more than half of the devices only (norm bounding:
Sun, Kairouz, Suresh, McMahan, 2019, "Can You Really Backdoor Federated Learning?",
https://arxiv.org/abs/1911.07963, section 4). Norms of the round before count, too; of earlier ones
where a tier has too few.

A tier in which fewer than three devices have sent updates has no median that its devices do not
make themselves. It is compared with all tiers, by the mean square of an entry. Its bound never
falls below an earlier one of the same run: where the others have settled, a device that moves as it
always did is no worse than before. So such a device can go as far as the fleet once allowed, in
every round, and no further.

Everything here is a function of what is in the store and on the disk: a server that was killed
comes to the same end.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from broker_server.settings.robust import RobustConfig
from broker_server.store import Screening
from fleet_protocol.errors import RefusalReason

COLOSSAL = 1e30
"""Norms beyond are refused in any case: a sum of such updates may be no float any more."""

PEERS = 3  # devices, and norms, that a tier needs for a median of its own


@dataclass(frozen=True)
class Earlier:
    """What is known of a tier from earlier rounds of a run.

    Attributes:
        norms: of updates that counted, as they counted.
        devices: that sent them.
        bound: the largest that was applied; None if none was.
    """

    norms: Sequence[float] = ()
    devices: frozenset[str] = frozenset()
    bound: float | None = None


@dataclass(frozen=True)
class Measured:
    """What an update is judged by.

    Attributes:
        tier: of the update.
        norm: of its difference to the weights that its device was sent.
        values: how many entries it has.
        declared: samples that the device says it trained on.
        announced: samples that the device announced before; None if it has not.
        device: who sent it.
    """

    tier: str
    norm: float
    values: int
    declared: int
    announced: int | None = None
    device: str = ""

    @property
    def samples(self) -> int:
        """Return with how many samples it may count: never more than were announced."""
        return self.declared if self.announced is None else min(self.declared, self.announced)


@dataclass(frozen=True)
class Verdict:
    """How an update counts; with the reason, for programs and for people, where it is refused."""

    screening: Screening
    reason: RefusalReason | None = None
    detail: str = ""


def lower_median(values: Iterable[float]) -> float:
    """Return the middle value, of an even number the smaller of the two.

    Of two values it is the one that a bad device cannot raise.
    """
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def screen(
    updates: Mapping[str, Measured],
    earlier: Mapping[str, Earlier],
    config: RobustConfig,
) -> dict[str, Verdict]:
    """Judge the updates of a round.

    Args:
        updates: what was measured of them, by task.
        earlier: what is known of earlier rounds, by tier.
        config: the bounds.

    Returns:
        A verdict for each task.
    """
    bounds = _norm_bounds(list(updates.values()), earlier, config.norm_bound)
    most = math.inf
    if updates and config.weight_bound:
        middle = lower_median(update.samples for update in updates.values())
        most = max(1, math.floor(config.weight_bound * middle))
    verdicts = {}
    for task, update in updates.items():
        samples = int(min(update.samples, most))
        verdicts[task] = _judge(update, bounds[update.tier], samples, config)
    return verdicts


def usual_bounds(earlier: Mapping[str, Earlier], factor: float) -> dict[str, float]:
    """Return the largest norm of every tier as far as earlier rounds decide it.

    A tier in which too few devices have sent updates has the largest of its earlier bounds.

    Args:
        earlier: what is known of earlier rounds, by tier.
        factor: of the median.
    """
    bounds = {}
    for tier, before in earlier.items():
        if len(before.devices) >= PEERS:
            bounds[tier] = factor * lower_median(before.norms)
        elif before.bound is not None:
            bounds[tier] = before.bound
    return bounds


def _norm_bounds(
    updates: Sequence[Measured], earlier: Mapping[str, Earlier], factor: float
) -> dict[str, float | None]:
    """Return the largest norm of every tier; None for any."""
    if not factor:
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
        before = earlier.get(tier, Earlier())
        peers = [*(update.norm for update in own), *before.norms]
        devices = before.devices.union(update.device for update in own)
        if len(devices) >= PEERS and len(own) >= PEERS:
            bound = factor * lower_median(peers)
        elif len(devices) >= PEERS:
            # One of two that does nothing would otherwise keep the other out.
            bound = factor * max(lower_median(peers), _usual_norm(roots, own[0].values))
        else:
            bound = factor * _usual_norm(roots, own[0].values)
            bound = max(bound, before.bound or 0.0)
        # Where most have changed nothing there is nothing to compare with.
        bounds[tier] = bound or None
    return bounds


def _usual_norm(roots: Sequence[float], values: int) -> float:
    """Return the norm that updates of so many entries have in the fleet; 0 where one is alone."""
    if len(roots) < 2:
        return 0.0
    return lower_median(roots) * math.sqrt(values)


def _judge(
    update: Measured,
    bound: float | None,
    samples: int,
    config: RobustConfig,
) -> Verdict:
    colossal = update.norm > COLOSSAL
    clips = config.beyond_norm == "clip" and not colossal
    too_far = False
    scale = 1.0
    if bound is not None and update.norm > bound:
        too_far = True
        scale = bound / update.norm
    screening = Screening(
        norm=update.norm,
        bound=bound,
        scale=scale if clips else 1.0,
        samples=samples,
        declared=update.declared,
    )
    if colossal or (too_far and not clips):
        allowed = f"{COLOSSAL:g}" if bound is None else f"{bound:.4g}"
        return Verdict(
            screening,
            RefusalReason.TOO_FAR,
            f"it differs by {update.norm:.4g} from the weights sent;"
            f" in tier {update.tier} up to {allowed} is taken",
        )
    if not samples or (samples < update.declared and config.beyond_weight == "refuse"):
        announced = "" if update.announced is None else f" ({update.announced} announced)"
        return Verdict(
            screening,
            RefusalReason.TOO_HEAVY,
            f"it claims {update.declared} samples{announced}; up to {samples} are taken",
        )
    return Verdict(screening)
