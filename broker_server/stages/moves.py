"""The changes to an update between the disk and the sums: scaling, staleness, rounding, clipping.

Each is a function from an update to an update. `moves_to` returns those that all updates of a round
need, which in most runs are none. `scale_change` and `limit_samples` apply a screen's verdict, so
they run before these. Differences are taken in float64, because the difference of large floats may
not be a float32.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from broker_server.stages.update import Tensors, Update
from broker_server.strategies.private_merge import Noise
from broker_server.strategies.stage import Stage, stated
from broker_server.strategies.traits import Trait
from fleet_protocol.noise import bounded

STAGES = stated(
    # A merge takes the updates that have arrived, from devices that began with different versions.
    Stage(
        name="round.buffer",
        remedy="remove round.buffer",
        setting="round.buffer",
        wanted=lambda run: run.round.buffer is not None,
        needs=frozenset({Trait.MEAN_OF_CHANGES, Trait.ASSIGNED_TIERS, Trait.LATE_COUNTS}),
        breaks=frozenset({Trait.ONE_VERSION, Trait.KNOWN_COUNT}),
    ),
    # The rounding of the weights on their way does not count as a change of the device.
    Stage(
        name="download.encoding",
        remedy='set download.encoding = "fp32"',
        setting="download.encoding",
        wanted=lambda run: run.download.encoding != "fp32",
        needs=frozenset({Trait.MEAN_OF_CHANGES}),
    ),
)

Move = Callable[[Update], Update]


@dataclass(frozen=True)
class BaseVersion:
    """The version into which updates are folded.

    Attributes:
        number: number of the version.
        weights: reads its global weights.
        staleness: exponent of `weight_of`.
        rounded: whether rounding has changed the weights that were sent to devices.
        noise: added to the sum of bounded changes; None if weights are merged.
    """

    number: int
    weights: Callable[[], Tensors]
    staleness: float
    rounded: bool = False
    noise: Noise | None = None

    def weight_of(self, version: int) -> float:
        """Return the weight of an update's change, by the version from which it was made.

        It falls with the number of versions made since. John Nguyen et al., AISTATS 2022,
        "Federated Learning with Buffered Asynchronous Aggregation",
        https://arxiv.org/abs/2106.06639, where the exponent is 1/2.
        """
        return float((1 + self.number - version) ** -self.staleness)


def moves_to(base: BaseVersion, versions: Iterable[int]) -> tuple[Move, ...]:
    """Return the moves of the updates of a round into sums that begin from a version.

    Args:
        base: the version.
        versions: numbers of the versions from which the updates are made.
    """
    # With noise the change is summed and not the weights, so there is nothing to put on a version.
    if base.noise is not None:
        return (partial(clip_change, clip=base.noise.clip),)
    is_late = any(version != base.number for version in versions)
    if is_late or base.rounded:
        return (partial(put_on, base),)
    return ()


def put_on(base: BaseVersion, update: Update) -> Update:
    """Add the change of an update to the weights of a version, so that it moves these.

    It has less weight if it was made from an earlier version, and the rounding of the weights on
    their way to the device does not count as a change.
    """
    if update.version == base.number and not base.rounded:
        return update  # the very weights that arrived: their difference would have other bits
    current = update.plan.slice(base.weights())
    sent = update.sent()
    weight = base.weight_of(update.version)
    weights = {}
    for name, value in update.weights.items():
        new = value.astype(np.float64)
        change = new - sent[name]
        moved = current[name] + weight * change
        weights[name] = moved.astype(np.float32)
    # Updates with one key count together, and an earlier version may have cut other units.
    late = update.version != base.number
    key = f"{update.key}@{update.version}" if late else update.key
    return replace(update, key=key, weights=weights)


def clip_change(update: Update, clip: float) -> Update:
    """Return the change of an update instead of its weights, bounded to a norm."""
    return replace(update, weights=bounded(update.weights, update.sent(), clip))


def scale_change(update: Update, scale: float) -> Update:
    """Multiply the change of an update by a scale below 1, before the moves of the round."""
    sent = update.sent()
    weights: dict[str, NDArray[np.float32]] = {}
    for name, value in update.weights.items():
        new = value.astype(np.float64)
        change = new - sent[name]
        scaled = sent[name] + scale * change
        weights[name] = scaled.astype(np.float32)
    return replace(update, weights=weights)


def limit_samples(update: Update, samples: int) -> Update:
    """Set the number of samples with which an update counts, before the moves of the round."""
    metrics = update.metrics.model_copy(update={"examples": samples})
    return replace(update, metrics=metrics)
