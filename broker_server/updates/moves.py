"""What may change an update between the disk and the sums: scaling, staleness, rounding, clipping.

Each is a function from an update to an update. Differences are taken in float64, since the
difference of large floats may be no float32.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from broker_server.settings.privacy import PrivacyConfig
from broker_server.updates.values import Tensors, Update
from fleet_protocol.noise import bounded


@dataclass(frozen=True)
class Base:
    """The version that updates are folded into.

    Attributes:
        number: of the version.
        weights: reads its global weights.
        staleness: exponent of `weight_of`.
        rounded: whether devices were sent weights that rounding has changed.
        noise: what is added to the sum of bounded changes; None where weights are merged.
    """

    number: int
    weights: Callable[[], Tensors]
    staleness: float
    rounded: bool = False
    noise: PrivacyConfig | None = None

    def weight_of(self, version: int) -> float:
        """Return what the change of an update counts that was made from a version.

        It falls with the number of versions that have been made since. John Nguyen et al., AISTATS
        2022, "Federated Learning with Buffered Asynchronous Aggregation",
        https://arxiv.org/abs/2106.06639, where the exponent is 1/2.
        """
        return float((1 + self.number - version) ** -self.staleness)


def move_to(base: Base, update: Update) -> Update:
    """Return what is folded of an update into the sums that begin from a version."""
    if base.noise is not None:
        return clip_change(update, base.noise.clip)
    if update.task.version == base.number and not base.rounded:
        return update  # the very weights that arrived: their difference would have other bits
    return put_on(base, update)


def put_on(base: Base, update: Update) -> Update:
    """Put the change of an update on the weights of a version, so that it moves these.

    It weighs less if it was made from an earlier version, and what rounding took from the weights
    on their way to the device is not counted as a change.
    """
    current = update.plan.slice(base.weights())
    sent = update.sent()
    weight = base.weight_of(update.task.version)
    weights = {}
    for name, value in update.weights.items():
        new = value.astype(np.float64)
        change = new - sent[name]
        moved = current[name] + weight * change
        weights[name] = moved.astype(np.float32)
    # Updates with one key count together, and an earlier version may have cut other units.
    late = update.task.version != base.number
    key = f"{update.key}@{update.task.version}" if late else update.key
    return replace(update, key=key, weights=weights)


def clip_change(update: Update, clip: float) -> Update:
    """Return the change of an update, not its weights, bounded to a norm."""
    return replace(update, weights=bounded(update.weights, update.sent(), clip))


def scale_change(update: Update, scale: float) -> Update:
    """Move an update towards what was sent: its change is multiplied by a scale below 1."""
    sent = update.sent()
    weights: dict[str, NDArray[np.float32]] = {}
    for name, value in update.weights.items():
        new = value.astype(np.float64)
        change = new - sent[name]
        scaled = sent[name] + scale * change
        weights[name] = scaled.astype(np.float32)
    return replace(update, weights=weights)


def limit_samples(update: Update, samples: int) -> Update:
    """Let an update count with so many samples."""
    metrics = update.metrics.model_copy(update={"examples": samples})
    return replace(update, metrics=metrics)
