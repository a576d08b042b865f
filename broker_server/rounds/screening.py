"""Which updates of a round count, and with what weight: bounds taken from the updates themselves.

One device must not own the model. An update is measured by the Euclidean norm of its difference to
the weights that its device was sent, and bounded by a multiple of the median of its tier, so no
bound has to be guessed: a median is moved by more than half of the devices only (norm bounding:
Sun, Kairouz, Suresh, McMahan, 2019, "Can You Really Backdoor Federated Learning?",
https://arxiv.org/abs/1911.07963, section 4). Norms of the round before count, too; of earlier ones
where a tier has too few. A tier with fewer than three is also compared by the mean square of an
entry with all tiers, and may go as far as the larger of both bounds, or one of two that does
nothing would keep the other out.

Everything here is a function of what is in the store and on the disk: a server that was killed
comes to the same end.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker_server.settings.robust import RobustConfig
from broker_server.store import Screening
from fleet_protocol.errors import RefusalReason

COLOSSAL = 1e30
"""Norms beyond are refused in any case: a sum of such updates may be no float any more."""

PEERS = 3  # norms that a tier needs for a median of its own
_BLOCK = (
    64 * 1024
)  # values whose differences are taken at once: as many as stay in a processor's cache


@dataclass(frozen=True)
class Measured:
    """What an update is judged by."""

    tier: str
    norm: float  # of its difference to the weights its device was sent
    values: int  # how many entries it has
    declared: int  # samples that the device says it trained on
    announced: int | None = None  # samples that it announced before, None if it has not
    device: str = ""


@dataclass(frozen=True)
class Verdict:
    """How an update counts; with the reason, for programs and for people, where it is refused."""

    screening: Screening
    reason: RefusalReason | None = None
    detail: str = ""


def difference(
    update: Mapping[str, NDArray[Any]], sent: Mapping[str, NDArray[Any]]
) -> tuple[float, int]:
    """How far an update is from what was sent.

    Returns:
        The Euclidean norm of the difference over all tensors, and the number of entries. Squares
        are float32, or float64 where they are too large for that; what is below 1e-22 counts as
        none.
    """
    total = 0.0
    count = 0
    with np.errstate(over="ignore", invalid="ignore"):
        for name, value in update.items():
            new = value.reshape(-1)
            old = sent[name].reshape(-1)
            count += new.size
            for start in range(0, new.size, _BLOCK):
                block = new[start : start + _BLOCK] - old[start : start + _BLOCK]
                square = float(np.multiply(block, block, out=block).sum())
                if not math.isfinite(square):
                    wide = (
                        new[start : start + _BLOCK].astype(np.float64) - old[start : start + _BLOCK]
                    )
                    square = float(wide @ wide)
                total += square
    return math.sqrt(total), count


def lower_median(values: Iterable[float]) -> float:
    """The middle value, of an even number the smaller of the two: of two the one that a bad device
    cannot raise.
    """
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def screen(
    updates: Mapping[str, Measured],
    earlier: Mapping[str, Sequence[float]],
    config: RobustConfig,
) -> dict[str, Verdict]:
    """Judge the updates of a round, by task.

    `earlier` are the norms taken in rounds before, by tier.
    """
    bounds = _norm_bounds(list(updates.values()), earlier, config.norm_bound)
    honest = {
        task: item.declared if item.announced is None else min(item.declared, item.announced)
        for task, item in updates.items()
    }
    most = math.inf
    if updates and config.weight_bound:
        most = max(1, math.floor(config.weight_bound * lower_median(honest.values())))
    return {
        task: _judge(item, bounds[item.tier], int(min(honest[task], most)), config)
        for task, item in updates.items()
    }


def _norm_bounds(
    updates: Sequence[Measured], earlier: Mapping[str, Sequence[float]], factor: float
) -> dict[str, float | None]:
    """The largest norm of every tier; None for any."""
    bounds: dict[str, float | None] = {}
    roots = [item.norm / math.sqrt(item.values) for item in updates if item.values]
    for tier in {item.tier for item in updates}:
        own = [item for item in updates if item.tier == tier]
        peers = [*(item.norm for item in own), *earlier.get(tier, ())]
        middle = lower_median(peers) if len(peers) >= PEERS else 0.0
        if len(roots) > 1 and len(own) < PEERS:
            middle = max(middle, lower_median(roots) * math.sqrt(own[0].values))
        # Where most have changed nothing there is nothing to compare with.
        bounds[tier] = factor * middle if factor and middle else None
    return bounds


def _judge(item: Measured, bound: float | None, samples: int, config: RobustConfig) -> Verdict:
    too_far = bound is not None and item.norm > bound
    clipped = too_far and config.beyond_norm == "clip" and item.norm <= COLOSSAL
    screening = Screening(
        norm=item.norm,
        bound=bound,
        scale=bound / item.norm if clipped and bound is not None else 1.0,
        samples=samples,
        declared=item.declared,
    )
    if item.norm > COLOSSAL or (too_far and not clipped):
        allowed = f"{COLOSSAL:g}" if bound is None else f"{bound:.4g}"
        return Verdict(
            screening,
            RefusalReason.TOO_FAR,
            f"it differs by {item.norm:.4g} from the weights sent; in tier {item.tier} up to {allowed} is taken",
        )
    if not samples or (samples < item.declared and config.beyond_weight == "refuse"):
        announced = "" if item.announced is None else f" ({item.announced} announced)"
        return Verdict(
            screening,
            RefusalReason.TOO_HEAVY,
            f"it claims {item.declared} samples{announced}; up to {samples} are taken",
        )
    return Verdict(screening)
